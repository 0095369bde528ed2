"""Charts as SVG that reads at any width. Pure: numbers in, text out.

Lines lie in a drawing stretched to the width of the chart, with strokes that keep their width.
Labels lie beside the drawing, at a share of the width, and keep their size. A chart of 380 pixels
thus has the letters of a chart of 1280 pixels. Colours are variables of the page, and change with
a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = """
:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1f2328; --dim: #59636e; --line: #d8dee4; --good: #1a7f37; --bad: #cf222e;
  --run: #0550ae; --calm: #8c959f; --rebuilt: #e0a526; --evaluation: #8250df;
  --checkpoint: #1a7f37; --server: #1a7f37; --trainer: #0969da; --both: #8250df;
  --spare: #8c959f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #161b22; --ink: #e6edf3; --dim: #9198a1; --line: #30363d; --good: #3fb950;
    --bad: #ff7b72; --run: #6cb6ff; --calm: #8b949e; --rebuilt: #d29922; --evaluation: #bc8cff;
    --checkpoint: #3fb950; --server: #3fb950; --trainer: #58a6ff; --both: #bc8cff;
    --spare: #8b949e;
  }
}
.chart { display: block; overflow: visible; }
.chart text {
  font: 12px system-ui, sans-serif; fill: var(--ink); font-variant-numeric: tabular-nums;
  paint-order: stroke; stroke: var(--paper); stroke-width: 3px; stroke-linejoin: round;
}
.chart .dim { fill: var(--dim); } .chart .title { font-size: 15px; font-weight: 600; }
.chart path, .chart line { vector-effect: non-scaling-stroke; fill: none; }
"""
"""Style of a page with charts. Fills and strokes name the variables."""

WIDTH = 1000.0
"""Units of a drawing from left to right."""
NARROW = 340.0
"""Pixels of the narrowest chart: labels of marks do not overlap at this width."""
LETTER, ROW, LANE = 6.6, 15.0, 20.0
"""Pixels of a letter at most, from one row of labels to the next, and of a lane."""
EDGE = 0.08
"""Labels nearer than this share of the width to an edge begin, or end, at their place."""


@dataclass(frozen=True)
class Line:
    """A line through `points`; `None` for y interrupts the line. `stairs`: y holds up to next x."""

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: str
    width: float = 2.0
    stairs: bool = False


@dataclass(frozen=True)
class Area:
    """A shaded area below `points`, with y from 0 to 1 for the height of the chart."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str


@dataclass(frozen=True)
class Band:
    """A shaded time from `begin` to `end`."""

    name: str
    begin: float
    end: float
    colour: str


@dataclass(frozen=True)
class Mark:
    """A dashed line at `at`, with a `label` above the chart."""

    name: str
    at: float
    label: str
    colour: str = "bad"


@dataclass(frozen=True)
class Chart:
    """Things to draw over x from 0 to `end`. `about` is a sentence for readers without pictures.

    `x` and `y` name the axes. Colours are names of variables in COLOURS.
    """

    about: str
    x: str
    y: str
    end: float
    lines: Sequence[Line] = ()
    areas: Sequence[Area] = ()
    bands: Sequence[Band] = ()
    marks: Sequence[Mark] = ()
    height: float = 200.0
    from_zero: bool = True


@dataclass(frozen=True)
class Lane:
    """A row of a time line: a label, and stays of (begin, end, colour)."""

    label: str
    stays: Sequence[tuple[float, float, str]]


@dataclass(frozen=True)
class Label:
    """The label of a mark, in row `level` counted from the chart upwards."""

    at: float
    level: int
    text: str


def ticks(low: float, high: float, count: int) -> list[float]:
    """At most `count` + 1 round numbers from `low` to `high`, ascending."""
    if not high > low:
        return [low]
    least = (high - low) / count
    power = 10.0 ** math.floor(math.log10(least))
    step = next(s for s in (power, 2 * power, 5 * power, 10 * power) if s >= least * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def placed(marks: Sequence[Mark], end: float, pixels: float = NARROW) -> list[Label]:
    """Labels for marks, without overlap in a chart of so many `pixels` or more."""
    ends: list[float] = []
    labels = []
    for mark in sorted(marks, key=lambda mark: mark.at):
        share, half = mark.at / end, LETTER * len(mark.label) / 2 + 3
        begin = {"start": 0.0, "middle": -half, "end": -2 * half}[_anchor(share)] + share * pixels
        level = next((row for row, taken in enumerate(ends) if taken <= begin), len(ends))
        ends[level : level + 1] = [begin + 2 * half]
        labels.append(Label(mark.at, level, mark.label))
    return labels


def drawn(chart: Chart) -> str:
    """The chart as an `<svg>` of HTML, as wide as the page."""
    top = _top(chart)
    return (
        f'<svg class="chart" role="img" aria-label="{escape(chart.about)}" width="100%" '
        f'height="{top + chart.height + 2 * ROW + 4:.0f}">{_inside(chart, top)}</svg>'
    )


def key(colours: Mapping[str, str]) -> str:
    """A legend as a list of HTML: a swatch and a name for each colour by name."""
    return (
        '<ul class="key">'
        + "".join(
            f'<li><i style="background:var(--{colour})"></i>{escape(name)}</li>'
            for name, colour in colours.items()
        )
        + "</ul>"
    )


def drawn_lanes(about: str, x: str, end: float, lanes: Sequence[Lane]) -> str:
    """Rows of bars over x from 0 to `end`, as an `<svg>` of HTML; arguments as in `Chart`."""
    height = LANE * len(lanes)
    parts = [
        f'<svg class="chart" role="img" aria-label="{escape(about)}" width="100%" '
        f'height="{height + 2 * ROW + 4:.0f}">'
    ]
    for number, lane in enumerate(lanes):
        top = LANE * number
        for begin, until, colour in lane.stays:
            wide = max(until - begin, 0.0)
            parts.append(
                f'<rect x="{100 * begin / end:.2f}%" y="{top + 2:.0f}" '
                f'width="{100 * wide / end:.2f}%" height="{LANE - 4:.0f}" rx="2" '
                f'fill="var(--{colour})" fill-opacity="0.75"/>'
            )
        parts.append(_text(0.004, top + LANE - 6, lane.label, "start"))
    along = ticks(0, end, 6)
    parts += [_text(at / end, height + ROW, _number(at, along)) for at in along]
    parts.append(_text(1, height + 2 * ROW, x, "end", "dim"))
    return "".join(parts) + "</svg>"


def names(chart: Chart) -> dict[str, str]:
    """The things of a chart by name, with their colours; things without a name are left out."""
    things: list[Line | Area | Band | Mark] = [
        *chart.lines,
        *chart.areas,
        *chart.bands,
        *chart.marks,
    ]
    return {thing.name: thing.colour for thing in things if thing.name}


def standalone(chart: Chart, title: str) -> str:
    """The chart as a file of its own, 1,000 pixels wide, with title and legend."""
    rows: list[list[tuple[str, str]]] = [[]]
    room = WIDTH
    for name, colour in names(chart).items():
        wide = LETTER * len(name) + 40
        if wide > room:
            rows.append([])
            room = WIDTH
        room -= wide
        rows[-1].append((name, colour))
    top = _top(chart) + 28
    below = top + chart.height + 2 * ROW + 10
    height = below + ROW * 1.5 * len(rows) + 8
    legend = ""
    for number, row in enumerate(rows):
        x, y = 0.0, below + ROW * (1 + 1.5 * number)
        for name, colour in row:
            legend += (
                f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="16" height="9" fill="var(--{colour})"/>'
                f'<text x="{x + 22:.0f}" y="{y:.0f}">{escape(name)}</text>'
            )
            x += LETTER * len(name) + 40
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{WIDTH + 40:.0f}" '
        f'height="{height:.0f}" viewBox="-20 0 {WIDTH + 40:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(chart.about)}"><style>{COLOURS}</style>'
        f'<rect x="-20" width="{WIDTH + 40:.0f}" height="{height:.0f}" fill="var(--paper)"/>'
        f'<text class="title" x="0" y="20">{escape(title)}</text>'
        f'<svg width="{WIDTH:.0f}" height="{height:.0f}" overflow="visible">'
        f"{_inside(chart, top)}</svg>{legend}</svg>\n"
    )


def _top(chart: Chart) -> float:
    """Pixels above the drawing: the name of the axis, and the rows of labels."""
    rows = max((label.level + 1 for label in placed(chart.marks, chart.end)), default=0)
    return ROW * (1 + rows) + 6


def _inside(chart: Chart, top: float) -> str:
    low, high = _range(chart)
    height, bottom = chart.height, top + chart.height

    def x(value: float) -> float:
        return round(value / chart.end * WIDTH, 2)

    def y(value: float) -> float:
        return round(height - (value - low) / (high - low) * height, 2)

    levels = ticks(low, high, 4)
    parts = [
        f'<svg y="{top:.0f}" width="100%" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH:.0f} {height:.0f}" preserveAspectRatio="none">'
    ]
    for band in chart.bands:
        wide = max(x(band.end) - x(band.begin), 0.0)
        colour = f"var(--{band.colour})"
        parts.append(
            f'<rect x="{x(band.begin)}" width="{wide:.2f}" height="{height:.0f}" fill="{colour}" '
            f'fill-opacity="0.25" stroke="{colour}" stroke-opacity="0.5" '
            'vector-effect="non-scaling-stroke"/>'
        )
    for area in chart.areas:
        points = " ".join(f"{x(at)},{round(height * (1 - share), 2)}" for at, share in area.points)
        first, last = x(area.points[0][0]), x(area.points[-1][0])
        parts.append(
            f'<polygon points="{first},{height:.0f} {points} {last},{height:.0f}" '
            f'fill="var(--{area.colour})" fill-opacity="0.35"/>'
        )
    parts += [
        f'<line x1="0" x2="{WIDTH:.0f}" y1="{y(level)}" y2="{y(level)}" stroke="var(--line)"/>'
        for level in levels
    ]
    for mark in chart.marks:
        parts.append(
            f'<line x1="{x(mark.at)}" x2="{x(mark.at)}" y1="0" y2="{height:.0f}" '
            f'stroke="var(--{mark.colour})" stroke-width="1.2" stroke-dasharray="4 3"/>'
        )
    for line in chart.lines:
        along = [(x(at), None if value is None else y(value)) for at, value in line.points]
        parts.append(
            f'<path d="{_path(along, line.stairs)}" stroke="var(--{line.colour})" '
            f'stroke-width="{line.width:g}" stroke-linejoin="round"/>'
        )
    parts.append("</svg>")
    parts += [
        _text(0, top + y(level) - 3, _number(level, levels), "start")
        for level in levels
        if top + y(level) - 3 > top + 8
    ]
    parts.append(_text(0, top - _top(chart) + ROW - 3, chart.y, "start", "dim"))
    for label in placed(chart.marks, chart.end):
        parts.append(_text(label.at / chart.end, top - 5 - ROW * label.level, label.text))
    places = ticks(0, chart.end, 6)
    parts += [_text(at / chart.end, bottom + ROW, _number(at, places)) for at in places]
    parts.append(_text(1, bottom + 2 * ROW, chart.x, "end", "dim"))
    return "".join(parts)


def _range(chart: Chart) -> tuple[float, float]:
    """The lowest and highest y, with a little room above, and below unless from zero."""
    values = [value for line in chart.lines for _, value in line.points if value is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if chart.from_zero:
        return 0.0, high * 1.08 or 1.0
    room = (high - low) * 0.08 or abs(high) * 0.08 or 1.0
    return low - room, high + room


def _path(points: Sequence[tuple[float, float | None]], stairs: bool) -> str:
    words, pen = [], False
    for number, (x, y) in enumerate(points):
        if y is None:
            if stairs and pen:
                words.append(f"H{x}")
            pen = False
            continue
        if not pen:
            words.append(f"M{x} {y}")
            alone = number + 1 == len(points) or points[number + 1][1] is None
            words += [f"h{0.01}"] if alone and not stairs else []
        else:
            words.append(f"H{x}V{y}" if stairs else f"L{x} {y}")
        pen = True
    return "".join(words)


def _anchor(share: float) -> str:
    return "start" if share < EDGE else "end" if share > 1 - EDGE else "middle"


def _text(share: float, y: float, text: str, anchor: str = "", style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return (
        f'<text x="{100 * share:.2f}%" y="{y:.1f}" text-anchor="{anchor or _anchor(share)}"{named}>'
        f"{escape(text)}</text>"
    )


def _number(value: float, among: Sequence[float]) -> str:
    """A tick in as many decimals as the distance of the ticks needs."""
    step = among[1] - among[0] if len(among) > 1 else 1.0
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"

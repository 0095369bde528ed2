"""The time line of a drill as a PNG."""

from __future__ import annotations

import importlib.util
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ecrm.base.wording import named
from ecrm.drill.report import Report
from ecrm.drill.table import headline
from ecrm.drill.timeline import Timeline
from ecrm.errors import UsageError

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES, DOTS_PER_INCH = (11.0, 5.4), 130
LABEL_POINTS = 9.0
NAMED_KILLS = 12
"""Most kills with labels such as "rank 3"; more kills are labelled "3"."""


@dataclass(frozen=True)
class Colours:
    """One colour per thing drawn."""

    paper: str
    ink: str
    faint: str
    undisturbed: str
    disturbed: str
    kill: str
    rebuilt: str


LIGHT = Colours("#ffffff", "#1f2328", "#d8dee4", "#8c959f", "#0550ae", "#cf222e", "#e0a526")
DARK = Colours("#161b22", "#e6edf3", "#30363d", "#8b949e", "#6cb6ff", "#ff7b72", "#d29922")


@dataclass(frozen=True)
class Label:
    """A text above the plot at `seconds`, in row `level` counted from the plot upwards."""

    seconds: float
    level: int
    text: str


def require_matplotlib() -> None:
    """Raise UsageError unless matplotlib is installed; does not import it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "a drill draws its time line with matplotlib, which is not installed: "
            "type pip install 'ecrm[matplotlib]'"
        )


def kill_labels(line: Timeline, seconds: float, width_points: float) -> list[Label]:
    """Labels for the kills of a plot, without overlap; one label for simultaneous kills.

    The plot is `seconds` long and `width_points` wide.
    """
    if not line.kills:
        return []
    together: list[tuple[float, list[int]]] = []
    for time, rank in line.kills:
        if together and (time - together[-1][0]) / seconds * width_points < 2:
            together[-1][1].append(rank)
        else:
            together.append((time, [rank]))
    ends: list[float] = []
    labels = []
    for time, ranks in together:
        text = (
            named("rank", sorted(ranks))
            if len(line.kills) <= NAMED_KILLS
            else ", ".join(map(str, sorted(ranks)))
        )
        half = 0.31 * LABEL_POINTS * len(text) + 2
        centre = time / seconds * width_points
        level = next((i for i, end in enumerate(ends) if end <= centre - half), len(ends))
        ends[level : level + 1] = [centre + half]
        labels.append(Label(time, level, text))
    return labels


def draw(report: Report, colours: Colours = LIGHT, titled: bool = True) -> bytes:
    """The picture as PNG.

    The picture shows the throughput of both runs per bucket, kills, and the share of lost rows
    rebuilt.
    """
    import matplotlib

    style: dict[Any, object] = {
        "font.family": "DejaVu Sans",
        "font.size": LABEL_POINTS + 1,
        "text.color": colours.ink,
        "axes.labelcolor": colours.ink,
        "axes.edgecolor": colours.faint,
        "xtick.color": colours.ink,
        "ytick.color": colours.ink,
        "figure.facecolor": colours.paper,
        "axes.facecolor": colours.paper,
    }
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(style):
        figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH)
        FigureCanvasAgg(figure)
        _fill(figure, report, colours, titled)
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


def _fill(figure: Figure, report: Report, colours: Colours, titled: bool) -> None:
    line = report.line
    seconds = max(line.seconds, line.bucket_seconds) * 1.02
    left, right, bottom = 0.075, 0.93 if line.rebuilt else 0.98, 0.185
    labels = kill_labels(line, seconds, (right - left) * SIZE_INCHES[0] * 72)
    height = SIZE_INCHES[1] * 72
    levels = max((label.level for label in labels), default=-1) + 1
    top = 1 - ((46 if titled else 12) + levels * (LABEL_POINTS + 4)) / height
    axes = figure.add_axes((left, bottom, right - left, top - bottom))
    _throughput(axes, line, report.unit, colours)
    axes.set_xlim(0, seconds)
    if line.rebuilt:
        _rebuilding(axes, line, colours)
    _kills(axes, line, labels, colours)
    axes.set_xlabel("seconds since the start of each run")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color=colours.faint, linewidth=0.6)
    axes.set_axisbelow(True)
    if titled:
        figure.text(
            left, 1 - 14 / height, headline(report), fontsize=12.5, fontweight="bold", va="top"
        )
    handles = [handle for each in figure.axes for handle in each.get_legend_handles_labels()[0]]
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(left - 0.008, 0.0),
        ncols=4,
        frameon=False,
    )


def _throughput(axes: Axes, line: Timeline, unit: str, colours: Colours) -> None:
    drawn = (
        ("undisturbed run", line.undisturbed, line.last_steps[0], colours.undisturbed, 1.6),
        ("disturbed run", line.disturbed, line.last_steps[1], colours.disturbed, 2.0),
    )
    for name, rates, end, colour, width in drawn:
        values = [math.nan if rate is None else rate for rate in rates] or [math.nan]
        edges = [i * line.bucket_seconds for i in range(len(values))]
        edges.append(max(end, edges[-1]))  # the last bucket ends with the run
        axes.stairs(values, edges, baseline=None, color=colour, linewidth=width, label=name)
    fastest = max(
        (rate for rate in (*line.undisturbed, *line.disturbed) if rate is not None), default=1.0
    )
    axes.set_ylim(0, fastest * 1.08)
    axes.set_ylabel(f"throughput ({unit}, per {line.bucket_seconds:g} s)")
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _rebuilding(axes: Axes, line: Timeline, colours: Colours) -> None:
    """Draw the share rebuilt as a shaded area, on a second axis, behind the throughput."""
    second = axes.twinx()
    axes.set_zorder(second.get_zorder() + 1)
    axes.patch.set_visible(False)
    for number, curve in enumerate(line.rebuilt):
        times, shares = [time for time, _ in curve], [100 * share for _, share in curve]
        name = "lost rows rebuilt (right axis)" if number == 0 else None
        second.fill_between(
            times, shares, color=colours.rebuilt, alpha=0.28, linewidth=0, label=name
        )
        second.plot(times, shares, color=colours.rebuilt, linewidth=1.2)
        second.axvspan(times[0], times[-1], color=colours.rebuilt, alpha=0.08, linewidth=0)
    second.set_ylim(0, 108)
    second.set_yticks(range(0, 101, 20))
    second.set_ylabel("lost rows rebuilt (%)")
    second.spines["top"].set_visible(False)


def _kills(axes: Axes, line: Timeline, labels: list[Label], colours: Colours) -> None:
    for number, (time, _) in enumerate(line.kills):
        name = "SIGKILL, with the rank" if number == 0 else None
        axes.axvline(time, color=colours.kill, linewidth=1.1, linestyle=(0, (4, 2)), label=name)
    for label in labels:
        axes.annotate(
            label.text,
            (label.seconds, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3 + label.level * (LABEL_POINTS + 4)),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=LABEL_POINTS,
            color=colours.kill,
            annotation_clip=False,
        )

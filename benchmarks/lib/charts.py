"""What the figures share: style, and the few kinds of chart."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure as Canvas

from lib.ratios import Row

PAPER, INK, FAINT, BAR = "#ffffff", "#1f2328", "#d8dee4", "#cf222e"
COLOURS = ("#0550ae", "#e0a526", "#1a7f37", "#8c959f", "#8250df", "#bc4c00", "#bf3989", "#1b7c83")
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 11.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": PAPER,  # opaque: legible on a light page and on a dark one
    "axes.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 10.5,
}
WIDTH = 6.6
"""Inches: one column of panels, so that letters can be read on a telephone."""
PATCH = {"boxstyle": "square,pad=0.1", "facecolor": PAPER, "edgecolor": "none", "alpha": 0.8}


@dataclass(frozen=True)
class Figure:
    """A figure: the CSV file it is drawn from, its size in inches, and its drawing function.

    The function draws the rows on an empty canvas.
    """

    csv: str
    size: tuple[float, float]
    draw: Callable[[Canvas, Sequence[Row]], None]


def legend(axes, columns: int = 3, only: Sequence[str] = ()) -> None:
    """Between the title and the data; of all labels, or of `only` these."""
    found = [
        (handle, label)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        if not only or label in only
    ]
    axes.legend(
        *zip(*found, strict=True),
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        borderaxespad=0.2,
        borderpad=0.0,
        handlelength=1.2,
        columnspacing=1.0,
        labelspacing=0.2,
    )
    lines = -(-len(found) // columns)
    axes.set_title(axes.get_title(loc="left"), pad=7 + 15 * lines)


def target(axes, bar: float, place: int, label: str, reach: float = 0.4) -> None:
    """A mark across a sideways bar, at what was wanted of it; the first names it in the legend."""
    axes.plot(
        [bar, bar],
        [place - reach, place + reach],
        color=BAR,
        linewidth=2.2,
        label=None if place else label,
    )


def bars(
    axes, labels: Sequence[str], series: dict[str, list[list[float]]], sideways: bool = False
) -> None:
    """Bars of the medians, side by side for each label, with a dot for every value.

    `series` has a list of values for each label.
    """
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(labels))]
        draw = axes.barh if sideways else axes.bar
        medians = [statistics.median(each) if each else 0.0 for each in values]
        draw(places, medians, width * 0.92, color=COLOURS[number], alpha=0.75, label=name)
        for place, each in zip(places, values, strict=True):
            xs, ys = [place] * len(each), each
            axes.plot(
                *((ys, xs) if sideways else (xs, ys)), "o", color=INK, markersize=2.4, alpha=0.7
            )
    (axes.set_yticks if sideways else axes.set_xticks)(range(len(labels)), labels)
    axes.grid(axis="y" if sideways else "x", visible=False)
    if sideways:
        axes.set_ylim(len(labels) - 0.4, -0.6)


def dots(axes, values: dict[str, list[float]], colour: str = COLOURS[0]) -> None:
    """A column of dots for each name, and a ring with a number at their median."""
    for place, each in enumerate(values.values()):
        middle = statistics.median(each)
        axes.plot([place] * len(each), each, "o", color=colour, markersize=3.5, alpha=0.5)
        axes.plot(
            [place],
            [middle],
            "o",
            color=colour,
            markersize=9,
            fillstyle="none",
            markeredgewidth=1.6,
        )
        axes.annotate(
            f"{middle:.2f}",
            (place, middle),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=10.5,
            bbox=PATCH,
        )
    axes.set_xticks(range(len(values)), list(values))
    axes.set_xlim(-0.5, len(values) - 0.3)
    axes.grid(axis="x", visible=False)

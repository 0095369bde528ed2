"""Draws every figure of the docs from the committed CSV files.

A figure whose CSV does not exist is left out, and a line says so. Dots are single runs or rounds,
bars and rings medians. A picture carries the SHA-256 of its CSV. A new figure is one entry of
FIGURES.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator
from PIL import Image

from lib.charts import BAR, COLOURS, INK, STYLE, Figure, bars, dots, legend
from lib.protection_figures import PROTECTION_FIGURES
from lib.ratios import KEPT_BAR, KERNEL_BARS, STEP_BARS, scaling_ratios, step_ratios
from lib.tables import ROOT, Row, TableError, groups, numbers, read_rows, source

MADE_FROM = "Source"
"""The PNG's text that holds the SHA-256 of the CSV."""


def recovery(canvas: Canvas, rows: Sequence[Row]) -> None:
    """The gap around a kill with the share of it that is recovery, and throughput before, during and after."""
    runs = groups(rows, "scenario")
    labels = [name.replace(", ", ",\n", 1) for (name,) in runs]
    left, right = canvas.subplots(1, 2, sharey=True)
    fields = {"gap": "gap_ms", "of it recovery": "recovery_ms"}
    bars(
        left,
        labels,
        {name: [numbers(mine, field) for mine in runs.values()] for name, field in fields.items()},
        sideways=True,
    )
    left.invert_yaxis()
    left.set_title("gap around a SIGKILL")
    left.set_xlabel("ms")
    when = ("before", "during", "after")
    pace = {
        one: [
            [rate / 1000 for rate in numbers(mine, f"samples_per_second_{one}")]
            for mine in runs.values()
        ]
        for one in when
    }
    bars(right, labels, pace, sideways=True)
    right.set_title("throughput around it")
    right.set_xlabel("thousand samples/s")
    for axes in (left, right):
        legend(axes)


def scrub(canvas: Canvas, rows: Sequence[Row]) -> None:
    """What a step takes with so many rows scrubbed, over a step without."""
    axes = canvas.subplots()
    dots(
        axes,
        {
            f"{int(count):,}": numbers(mine, "ratio_to_0")
            for (count,), mine in groups(rows, "rows_per_step").items()
        },
    )
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set_ylim(bottom=0.9)
    axes.set_xlabel("rows scrubbed per shard and step")
    axes.set_ylabel("a step, ratio to none")
    axes.set_title("cost of scrubbing")


def checkpoint(canvas: Canvas, rows: Sequence[Row]) -> None:
    """Seconds of writing, checking and loading a checkpoint, by mode."""
    axes = canvas.subplots()
    fields = {
        "training waits": "stall_seconds",
        "until it is durable": "seconds",
        "checking": "check_seconds",
        "loading": "load_seconds",
    }
    by_mode = {
        mode: [numbers(mine, field) if mine[0][field] != "" else [] for field in fields.values()]
        for (mode,), mine in groups(rows, "mode").items()
    }
    bars(axes, list(fields), by_mode)
    axes.set_ylabel("seconds")
    size = int(rows[0]["bytes"])
    axes.set_title(f"a checkpoint of one rank, {size / 1e6:,.0f} MB")
    legend(axes)


def kernels(canvas: Canvas, rows: Sequence[Row]) -> None:
    """Time of our kernel over each contender's, with p20 and p80, and the bar as a line."""
    shown = [row for row in rows if row["contender"] in KERNEL_BARS]
    axes = canvas.subplots()
    for place, row in enumerate(shown):
        low, middle, high = (float(row[f"ours_over_this{which}"]) for which in ("_p20", "", "_p80"))
        bar = KERNEL_BARS[row["contender"]]
        colour = COLOURS[list(KERNEL_BARS).index(row["contender"])]
        axes.barh(place, middle, 0.7, color=colour, alpha=0.75)
        axes.plot([low, high], [place, place], color=INK, linewidth=1.1)
        axes.plot(
            [bar, bar],
            [place - 0.45, place + 0.45],
            color=BAR,
            linewidth=1.8,
            label="bar: at most" if place == 0 else None,
        )
        axes.annotate(
            f"{middle:.2f}",
            (max(high, middle), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    names = [
        f"{row['case']} ({int(row['rows']):,} x {row['row_bytes']} B)\nover {row['contender']}"
        for row in shown
    ]
    axes.set_yticks(range(len(shown)), names, fontsize=7.5)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("our time over theirs, median of the rounds' ratios; line: p20 to p80")
    axes.set_title("kernels against their peers and floors")
    legend(axes)


def step(canvas: Canvas, rows: Sequence[Row]) -> None:
    """Per regime: samples per second of every contender, and ratios of the same round with their bars."""
    regimes = groups(rows, "regime")
    grid = canvas.subplots(len(regimes), 2, squeeze=False)
    for ((regime,), mine), (left, right) in zip(regimes.items(), grid, strict=True):
        found = {
            name: numbers(each, "samples_per_second")
            for (name,), each in sorted(groups(mine, "contender").items())
        }
        bars(left, list(found), {"samples/s": list(found.values())}, sideways=True)
        left.set_title(f"{regime}: samples/s")
        left.xaxis.set_major_formatter("{x:,.0f}")
        left.xaxis.set_major_locator(MaxNLocator(5))
        wanted = [(one, other, bar) for name, one, other, bar in STEP_BARS if name == regime]
        ratios = {
            f"{one} /\n{other}": step_ratios(mine, regime, one, other) for one, other, _ in wanted
        }
        dots(right, {name: each for name, each in ratios.items() if each})
        for place, (_, _, bar) in enumerate(
            entry for entry, each in zip(wanted, ratios.values(), strict=True) if each
        ):
            right.plot(
                [place - 0.35, place + 0.35],
                [bar, bar],
                color=BAR,
                linewidth=1.8,
                label=None if place else "bar: at least",
            )
        right.set_title(f"{regime}: ratios")
        legend(right)


def scaling(canvas: Canvas, rows: Sequence[Row]) -> None:
    """A step over the first point of its series, and throughput kept while rebuilding."""
    about = {"tables": "rows of each table", "servers": "servers", "k": "k, m = 1", "m": "m, k = 4"}
    present = {
        series: label
        for series, label in about.items()
        if any(row["series"] == series for row in rows)
    }
    grid = canvas.subplots(1, len(present) + 1, width_ratios=[3] * len(present) + [2.2])
    for axes, (series, label) in zip(grid, present.items(), strict=False):
        found = {f"{value:,}": each for value, each in scaling_ratios(rows, series).items()}
        dots(axes, found)
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set_ylim(0, 1.1 * max(1.0, *(max(each) for each in found.values())))
        axes.set_xlabel(label)
    grid[0].set_title("a step, ratio to the first point of its series in the same round")
    kept = numbers((row for row in rows if row["series"] == "rebuild"), "kept_while_rebuilding")
    dots(grid[-1], {"a server killed": kept} if kept else {}, COLOURS[2])
    grid[-1].axhline(KEPT_BAR, color=BAR, linewidth=1.8, label="bar: at least")
    grid[-1].set_ylim(0, 1.1 * max([1.0, *kept]))
    grid[-1].set_xlabel("samples/s while\nrebuilding / before")
    legend(grid[-1])


FIGURES = {
    "recovery": Figure("recovery.csv", (12.0, 6.0), recovery),
    "scrub": Figure("scrub.csv", (6.0, 3.6), scrub),
    "checkpoint": Figure("checkpoint.csv", (6.5, 3.6), checkpoint),
    "kernels": Figure("kernels.csv", (10.0, 8.0), kernels),
    "step": Figure("step.csv", (11.0, 7.0), step),
    "scaling": Figure("scaling.csv", (14.0, 3.8), scaling),
    **PROTECTION_FIGURES,
}
"""By the name of the picture in docs/figures."""


def picture(figure: Figure, csv: Path, target: Path) -> None:
    """Draw one figure. Raises TableError if the CSV does not give it."""
    rows = read_rows(csv)
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=figure.size, dpi=110, layout="constrained")
        FigureCanvasAgg(canvas)
        try:
            figure.draw(canvas, rows)
        except (KeyError, ValueError, TypeError) as error:
            raise TableError(
                f"{csv} does not give the figure {target.stem}: {type(error).__name__} {error}"
            ) from None
        canvas.supxlabel(
            source(rows, figure.csv), fontsize=7.5, color=COLOURS[3], x=0.01, ha="left"
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(target, metadata={MADE_FROM: _digest(csv), "Software": None})


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stale(csv: Path, target: Path) -> str | None:
    """Why a picture is not the one of its CSV; None if it is."""
    if not target.exists():
        return "is missing"
    with Image.open(target) as image:
        return None if image.info.get(MADE_FROM) == _digest(csv) else "was drawn from another CSV"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw or check all figures; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit 1 if a picture is missing or of another CSV",
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="folder with benchmarks/results/ and docs/figures/"
    )
    options = parser.parse_args(arguments)
    wrong = 0
    for name, figure in FIGURES.items():
        csv, target = (
            options.root / "benchmarks" / "results" / figure.csv,
            options.root / "docs" / "figures" / f"{name}.png",
        )
        try:
            if not csv.exists():
                print(f"figure {name} left out: there is no {csv.relative_to(options.root)}")
            elif not options.check:
                picture(figure, csv, target)
                print(f"{target.relative_to(options.root)} written")
            elif reason := stale(csv, target):
                print(f"{target.relative_to(options.root)} {reason}")
                wrong = 1
        except (TableError, OSError) as error:
            print(error, file=sys.stderr)
            return 2
    if wrong:
        print("type python benchmarks/publish.py", file=sys.stderr)
    return wrong


if __name__ == "__main__":
    sys.exit(main())

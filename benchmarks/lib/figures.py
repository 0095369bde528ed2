"""Draws every figure of the docs from the committed CSV files.

A figure whose CSV does not exist is left out, and a line says so. Dots are single runs or rounds,
bars and rings medians. A picture carries the SHA-256 of its CSV. A new figure is one entry of
FIGURES.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator
from PIL import Image

from lib.charts import (
    BAR,
    COLOURS,
    INK,
    STYLE,
    WIDTH,
    Figure,
    bars,
    dots,
    legend,
    target,
)
from lib.protection_figures import PROTECTION_FIGURES
from lib.ratios import (
    KEPT_BAR,
    KERNEL_BARS,
    STEP_BARS,
    STEP_FORMER,
    Row,
    scaling_ratios,
    step_ratios,
)
from lib.table_rows import TableError, groups, numbers, read_rows, source
from lib.tables import ROOT

MADE_FROM = "Source"
"""The PNG's text that holds the SHA-256 of the CSV."""


def recovery(canvas: Canvas, rows: Sequence[Row]) -> None:
    """The gap around a kill and how much of it is recovery; samples/s before, during and after."""
    runs = groups(rows, "scenario")
    labels = [name.replace(", ", ",\n", 1) for (name,) in runs]
    above, below = canvas.subplots(2, 1, height_ratios=[2, 2.6])
    fields = {"gap": "gap_ms", "of which recovery": "recovery_ms"}
    bars(
        above,
        labels,
        {name: [numbers(mine, field) for mine in runs.values()] for name, field in fields.items()},
        sideways=True,
    )
    above.set_title("The gap around a SIGKILL")
    above.set_xlabel("milliseconds")
    when = {"before the kill": "before", "while rebuilding": "during", "afterwards": "after"}
    pace = {
        label: [
            [rate / 1000 for rate in numbers(mine, f"samples_per_second_{one}")]
            for mine in runs.values()
        ]
        for label, one in when.items()
    }
    bars(below, labels, pace, sideways=True)
    below.set_title("Training speed around it")
    below.set_xlabel("thousand samples/s")
    for axes in (above, below):
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
    axes.set_xlabel("rows checked per shard and step")
    axes.set_ylabel("step time /\nstep time without scrubbing")
    axes.set_title("The cost of scrubbing")


def checkpoint(canvas: Canvas, rows: Sequence[Row]) -> None:
    """Seconds of writing, checking and loading a checkpoint, by mode."""
    axes = canvas.subplots()
    fields = {
        "training\nwaits": "stall_seconds",
        "durable\nafter": "seconds",
        "checksums\nverified in": "check_seconds",
        "loaded in": "load_seconds",
    }
    by_mode = {
        mode: [numbers(mine, field) if mine[0][field] != "" else [] for field in fields.values()]
        for (mode,), mine in groups(rows, "mode").items()
    }
    bars(axes, list(fields), by_mode)
    axes.set_ylabel("seconds")
    size = int(rows[0]["bytes"])
    axes.set_title(f"A checkpoint of one rank, {size / 1e6:,.0f} MB")
    legend(axes, columns=4)


def checkpoint_runs(canvas: Canvas, rows: Sequence[Row]) -> None:
    """Overhead of each checkpoint beside training, by mode and regime."""
    axes = canvas.subplots()
    found = groups(rows, "regime", "mode")
    modes = [mode for (mode,) in groups(rows, "mode")]
    percent = {
        regime: [
            [100 * value for value in numbers(found.get((regime, mode), []), "overhead")]
            for mode in modes
        ]
        for (regime,) in groups(rows, "regime")
    }
    axes.set_title("Training time that a checkpoint costs")
    bars(axes, modes, percent, sideways=True)
    axes.set_xlabel("% of the steps from one checkpoint to the next")
    legend(axes)


def kernels(canvas: Canvas, rows: Sequence[Row]) -> None:
    """Time of our kernel over each contender's, with p20 and p80, and the target as a line."""
    shown = [row for row in rows if row["contender"] in KERNEL_BARS]
    axes = canvas.subplots()
    for place, row in enumerate(shown):
        low, middle, high = (float(row[f"ours_over_this{which}"]) for which in ("_p20", "", "_p80"))
        colour = COLOURS[list(KERNEL_BARS).index(row["contender"])]
        axes.barh(place, middle, 0.4, color=colour, alpha=0.75)
        axes.plot([low, high], [place, place], color=INK, linewidth=1.1)
        target(axes, KERNEL_BARS[row["contender"]], place, "target: at most", reach=0.2)
        case = row["case"].replace("rowwise_adagrad ", "").partition(", of ")[0]
        axes.annotate(
            f"{case}: {int(row['rows']):,} rows of {row['row_bytes']} B / {row['contender']}",
            (0, place),
            xytext=(0, 8),
            textcoords="offset points",
            fontsize=9.5,
        )
        axes.annotate(
            f"{middle:.2f}",
            (max(high, middle), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
        )
    axes.set_yticks([])
    axes.set_ylim(-0.8, len(shown) - 0.5)
    axes.invert_yaxis()
    longest = max(float(row["ours_over_this_p80"]) for row in shown)
    axes.set_xlim(0, max(1.6, 1.12 * longest))  # with room for the number
    axes.set_xlabel("ECRM's time / the other's time: median, p20 to p80 as a line")
    axes.set_title("Kernels against their peers and floors")
    legend(axes)


def step(canvas: Canvas, rows: Sequence[Row]) -> None:
    """Samples per second of every contender by regime.

    Beside them stand ratios within one round, with their targets.
    """
    regimes = groups(rows, "regime")
    panels = canvas.subplots(len(regimes) + 1, 1, height_ratios=[2] * len(regimes) + [1.5])
    for ((regime,), mine), axes in zip(regimes.items(), panels, strict=False):
        found = {
            name: numbers(each, "samples_per_second")
            for (name,), each in sorted(groups(mine, "contender").items())
            if name not in STEP_FORMER
        }
        bars(axes, list(found), {"samples/s": list(found.values())}, sideways=True)
        axes.set_title(f"Samples/s, {regime}")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_major_locator(MaxNLocator(4))
    ratios = panels[-1]
    wanted = [
        (f"{one} / {other},\n{regime}", step_ratios(rows, regime, one, other), bar)
        for regime, one, other, bar in STEP_BARS
    ]
    wanted = [entry for entry in wanted if entry[1]]
    bars(
        ratios,
        [label for label, _, _ in wanted],
        {"ratio": [values for _, values, _ in wanted]},
        sideways=True,
    )
    for place, (_, values, bar) in enumerate(wanted):
        target(ratios, bar, place, "target: at least")
        ratios.annotate(
            f"{statistics.median(values):.2f}",
            (max(bar, *values), place),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=10.5,
        )
    ratios.set_title("Ratios of samples/s within a round")
    if wanted:
        legend(ratios, only=("target: at least",))


def scaling(canvas: Canvas, rows: Sequence[Row]) -> None:
    """A step over the first point of its series, and throughput kept while rebuilding."""
    about = {
        "tables": "rows per table",
        "servers": "servers",
        "k": "k, with m = 1",
        "m": "m, with k = 4",
    }
    present = {
        series: label
        for series, label in about.items()
        if any(row["series"] == series for row in rows)
    }
    grid = canvas.subplots(3, 2).ravel()
    for axes, (series, label) in zip(grid, present.items(), strict=False):
        found = {f"{value:,}": each for value, each in scaling_ratios(rows, series).items()}
        dots(axes, found)
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set_ylim(0, 1.15 * max(1.0, *(max(each) for each in found.values())))
        axes.set_title(label)
        axes.set_ylabel("step time / first" if axes in grid[::2] else "")
    last = grid[len(present)]
    kept = numbers((row for row in rows if row["series"] == "rebuild"), "kept_while_rebuilding")
    dots(last, {"a server was killed": kept} if kept else {}, COLOURS[2])
    last.axhline(KEPT_BAR, color=BAR, linewidth=1.8, label="target: at least")
    last.set_ylim(0, 1.15 * max([1.0, *kept]))
    last.set_title("samples/s while rebuilding / before")
    legend(last)
    for axes in grid[len(present) + 1 :]:
        axes.set_visible(False)


FIGURES = {
    "recovery": Figure("recovery.csv", (WIDTH, 9.0), recovery),
    "scrub": Figure("scrub.csv", (WIDTH, 3.8), scrub),
    "checkpoint": Figure("checkpoint.csv", (WIDTH, 4.2), checkpoint),
    "checkpoint_runs": Figure("checkpoint_runs.csv", (WIDTH, 4.0), checkpoint_runs),
    "kernels": Figure("kernels.csv", (WIDTH, 12.0), kernels),
    "step": Figure("step.csv", (WIDTH, 10.5), step),
    "scaling": Figure("scaling.csv", (WIDTH, 8.5), scaling),
    **PROTECTION_FIGURES,
}
"""By the name of the picture in docs/figures."""


def picture(figure: Figure, csv: Path, target: Path) -> None:
    """Draw one figure. Raises TableError if the CSV does not give it."""
    rows = read_rows(csv)
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=figure.size, dpi=120, layout="constrained")
        canvas.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
        FigureCanvasAgg(canvas)
        try:
            figure.draw(canvas, rows)
        except (KeyError, ValueError, TypeError) as error:
            raise TableError(
                f"{csv} does not give the figure {target.stem}: {type(error).__name__} {error}"
            ) from None
        told = textwrap.fill(source(rows, figure.csv), int(14 * figure.size[0]))
        canvas.supxlabel(told, fontsize=8, color=COLOURS[3], x=0.01, ha="left")
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

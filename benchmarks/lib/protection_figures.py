"""The figures of the comparison of protections; figures.py draws them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator, NullFormatter

from lib.charts import BAR, COLOURS, INK, PATCH, WIDTH, Figure, bars, legend
from lib.contenders import CONTENDERS, REBUILD_ROWS
from lib.protection_tables import sizes
from lib.ratios import Row
from lib.table_rows import groups, numbers
from lib.versus import BASELINES, DROP_BAR, OURS, by_round, overheads

BUCKETS_PER_INTERVAL = 48
"""Buckets that the time line of a figure has."""


def _in_sweep(name: str) -> bool:
    return name in CONTENDERS and CONTENDERS[name].sweep


def _regimes(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["regime"] for row in rows))


def _by_contender(
    found: Mapping[tuple[str, str], Sequence[float]], regime: str, among: Callable[[str], bool]
) -> dict[str, list[float]]:
    """Values of the contenders of a regime, in the order of lib/contenders.py."""
    order = {name: place for place, name in enumerate(CONTENDERS)}
    names = sorted(
        (name for at, name in found if at == regime and among(name)),
        key=lambda name: order.get(name, len(order)),
    )
    return {name: list(found[regime, name]) for name in names}


def _values(
    rows: Sequence[Row], field: str, factor: float = 1.0
) -> dict[tuple[str, str], list[float]]:
    return {
        key: [factor * value for value in rounds.values()]
        for key, rounds in by_round(rows, field).items()
    }


def _by_regime(
    axes,
    rows: Sequence[Row],
    found: Mapping[tuple[str, str], Sequence[float]],
    among: Callable[[str], bool],
) -> None:
    """Bars of the contenders that have values, one for each regime."""
    regimes = _regimes(rows)
    each = {regime: _by_contender(found, regime, among) for regime in regimes}
    names = [name for name in CONTENDERS if any(name in mine for mine in each.values())]
    if names:
        series = {regime: [mine.get(name, []) for name in names] for regime, mine in each.items()}
        bars(axes, names, series, sideways=True)
        legend(axes)


def overhead(canvas: Canvas, rows: Sequence[Row]) -> None:
    """By contender and regime: how much longer a step takes than with `none`."""
    axes = canvas.subplots()
    axes.set_title("Overhead without failures")
    percent = {key: [100 * value for value in values] for key, values in overheads(rows).items()}
    _by_regime(axes, rows, percent, lambda name: not _in_sweep(name))
    axes.set_xscale("symlog", linthresh=10)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("% longer steps than with none\n(logarithmic above 10)")


def lost_progress(canvas: Canvas, rows: Sequence[Row]) -> None:
    """By contender and regime: time from the last step before a kill to the first new one."""
    axes = canvas.subplots()
    axes.set_title("Lost progress after a SIGKILL")
    _by_regime(axes, rows, _values(rows, "lost_ms"), lambda name: not _in_sweep(name))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("milliseconds without a new step (logarithmic)")


def recovering(canvas: Canvas, rows: Sequence[Row]) -> None:
    """By contender and regime: throughput until all is restored, over that of undisturbed steps."""
    axes = canvas.subplots()
    axes.set_title("Training speed while recovering")
    axes.axvline(1 - DROP_BAR, color=BAR, linewidth=1.6, label="target: above")
    _by_regime(axes, rows, _values(rows, "kept_recovering"), lambda name: not _in_sweep(name))
    axes.set_xlabel("samples/s while recovering / undisturbed")
    legend(axes, columns=2)


def copies(canvas: Canvas, rows: Sequence[Row]) -> None:
    """Effect of k and of the number of copies: a step, seconds until restored, speed meanwhile."""
    panels = {
        "Overhead, %": {
            key: [100 * value for value in values] for key, values in overheads(rows).items()
        },
        "Full redundancy restored after, s": _values(rows, "whole_after_s"),
        "Samples/s while rebuilding / undisturbed": _values(rows, "kept_rebuilding"),
    }
    wanted = ("erasure-k4", "erasure-k2", "chain-2", "chain-3", "replicate-2", "replicate-3")
    for axes, (title, found) in zip(canvas.subplots(len(panels), 1), panels.items(), strict=True):
        axes.set_title(title)
        _by_regime(axes, rows, found, wanted.__contains__)


def rebuild(canvas: Canvas, rows: Sequence[Row]) -> None:
    """Effect of the rows rebuilt per step on speed meanwhile and on the time until restored."""
    sizes = {OURS: REBUILD_ROWS["embedding-heavy"]} | {
        name: contender.sets["protection.rebuild_rows_per_step"]
        for name, contender in CONTENDERS.items()
        if contender.sweep
    }
    sizes = dict(sorted(sizes.items(), key=lambda item: item[1]))
    panels = {
        "kept_recovering": "samples/s while recovering /\nundisturbed",
        "whole_after_s": "full redundancy\nrestored after, s",
    }
    grid = canvas.subplots(2, 1, sharex=True)
    for axes, (field, label) in zip(grid, panels.items(), strict=True):
        found = _values(rows, field)
        points = {
            size: found["embedding-heavy", name]
            for name, size in sizes.items()
            if ("embedding-heavy", name) in found
        }
        for size, values in points.items():
            axes.plot(
                [size] * len(values), values, "o", color=COLOURS[0], markersize=3.5, alpha=0.5
            )
        axes.plot(
            list(points),
            [statistics.median(values) for values in points.values()],
            "-",
            color=COLOURS[0],
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(points), [f"{size:,}" for size in points])
        axes.set_ylim(bottom=0)
        axes.set_ylabel(label)
    grid[0].set_title("Rows rebuilt per step: erasure-k4, embedding-heavy")
    grid[0].axhline(1 - DROP_BAR, color=BAR, linewidth=1.6, label="target: above")
    legend(grid[0])
    grid[-1].set_xlabel("protection.rebuild_rows_per_step (logarithmic)")


def _rates(
    rows: Sequence[Row], begin: float, end: float, buckets: int = BUCKETS_PER_INTERVAL
) -> tuple[list[float], list[float]]:
    """(middles of buckets, new samples per second in each); a span's samples are spread evenly."""
    width = (end - begin) / buckets
    samples, covered = [0.0] * buckets, [0.0] * buckets
    for row in rows:
        since, until, new = float(row["begin"]), float(row["end"]), float(row["new_samples"])
        for bucket in range(buckets):
            overlap = min(until, begin + (bucket + 1) * width) - max(since, begin + bucket * width)
            if overlap > 0:
                samples[bucket] += new * overlap / (until - since)
                covered[bucket] += overlap
    shown = [bucket for bucket in range(buckets) if covered[bucket] > 0]
    return [begin + (bucket + 0.5) * width for bucket in shown], [
        samples[bucket] / covered[bucket] for bucket in shown
    ]


def throughput(canvas: Canvas, rows: Sequence[Row]) -> None:
    """New samples per second before, during and after the kill, of one run each.

    Steps that are done again do not count.
    """
    found = groups(rows, "regime", "contender")
    regimes = _regimes(rows)
    panels = canvas.subplots(len(regimes), 1, squeeze=False)[:, 0]
    for regime, axes in zip(regimes, panels, strict=True):
        mine = {
            name: lines
            for (at, name), lines in found.items()
            if at == regime and name != "none" and not _in_sweep(name)
        }
        end = min((max(float(row["end"]) for row in lines) for lines in mine.values()), default=1.0)
        names = [
            name for name, contender in CONTENDERS.items() if name in mine and contender.timeline
        ]
        for number, name in enumerate(names):
            axes.plot(
                *_rates(mine[name], -end, end),
                color=COLOURS[number % len(COLOURS)],
                linewidth=1.4,
                label=name,
            )
        axes.axvline(0, color=BAR, linewidth=1.2)
        axes.set_ylim(bottom=0)
        axes.set_title(f"New samples/s around the kill, {regime}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        if names and axes is panels[0]:
            legend(axes, columns=3)
    axes.set_xlabel("seconds before and after the SIGKILL (red line)")


def _spans(rows: Sequence[Row]) -> list[tuple[float, ...]]:
    """(begin, end, new samples) of each row of protections_timeline.csv."""
    return [tuple(float(row[name]) for name in ("begin", "end", "new_samples")) for row in rows]


def _lost_seconds(rows: Sequence[Row]) -> float:
    """What the kill at second 0 cost: from the begin of the step under way to the end of the first
    new step after it, less one median step."""
    spans = _spans(rows)
    begin = max(since for since, _, _ in spans if since <= 0)
    back = min(until for since, until, new in spans if since >= begin and new > 0)
    return back - begin - statistics.median(until - since for since, until, _ in spans)


def server_dies(canvas: Canvas, rows: Sequence[Row]) -> None:
    """New samples per second with parity and with checkpoints, one run each, a server killed."""
    found = groups(rows, "regime", "contender")
    regimes = _regimes(rows)
    regime = "embedding-heavy" if "embedding-heavy" in regimes else regimes[0]
    labels = {"parity": (OURS, COLOURS[0]), "checkpoints": (BASELINES[0], COLOURS[5])}
    runs = {
        label: (found[regime, name], colour)
        for label, (name, colour) in labels.items()
        if (regime, name) in found
    }
    axes = canvas.subplots()
    # without the first and last steps of the shorter run, on either side of the kill
    ends = [max(numbers(mine, "end")) for mine, _ in runs.values()]
    begins = [-min(numbers(mine, "begin")) for mine, _ in runs.values()]
    end = 0.85 * min([*ends, *begins], default=1.0)
    for mine, colour in runs.values():
        seconds, rates = _rates(mine, -end, end, buckets=96)
        axes.plot(seconds, [rate / 1e3 for rate in rates], color=colour, linewidth=2.6)
    most = axes.dataLim.y1
    axes.axvline(0, color=BAR, linewidth=2)
    # above the curves: below, words would hide checkpoints
    upper, lower = 1.31 * most, 1.14 * most
    said = [("server killed ", upper, "right", BAR)]
    if "parity" in runs:
        mine, colour = runs["parity"]
        said.append((f"  parity: {_lost_seconds(mine):.2f} s lost", upper, "left", colour))
    if "checkpoints" in runs:
        mine, colour = runs["checkpoints"]
        said.append((f"  checkpoints: {_lost_seconds(mine):.1f} s lost", lower, "left", colour))
        said.append(("each dip: a checkpoint ", lower, "right", colour))
    for text, y, side, colour in said:
        axes.text(
            0.0, y, text, ha=side, va="center", color=colour, weight="bold", size=13, bbox=PATCH
        )
    axes.set_xlim(-end, end)
    axes.set_ylim(0, 1.42 * most)
    axes.set_ylabel("thousand new samples/s", size=13)
    axes.set_xlabel("seconds before and after the SIGKILL", size=13)
    axes.tick_params(labelsize=12)


def accuracy(canvas: Canvas, rows: Sequence[Row]) -> None:
    """AUC on the held-out rows over time, with a server killed and undisturbed.

    Rings mark the evaluations while shards are away.
    """
    found = groups(rows, "regime", "contender")
    regimes = _regimes(rows)
    panels = canvas.subplots(len(regimes), 1, squeeze=False)[:, 0]
    for regime, axes in zip(regimes, panels, strict=True):
        mine = {name: lines for (at, name), lines in found.items() if at == regime}
        for number, (name, lines) in enumerate(mine.items()):
            lines = [row for row in lines if row["auc"]]
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(
                [float(row["seconds"]) for row in lines],
                [float(row["auc"]) for row in lines],
                "o-",
                color=colour,
                markersize=3,
                label=name,
            )
            away = [row for row in lines if int(row.get("shards_away") or 0)]
            axes.plot(
                [float(row["seconds"]) for row in away],
                [float(row["auc"]) for row in away],
                "o",
                color=colour,
                markersize=7,
                fillstyle="none",
            )
            if lines and lines[0]["killed_seconds"]:
                axes.axvline(
                    float(lines[0]["killed_seconds"]),
                    color=colour,
                    linewidth=1,
                    linestyle=(0, (4, 2)),
                )
        axes.set_title(f"AUC on held-out rows, {regime}")
        legend(axes, columns=2)
    axes.set_xlabel("seconds since the first step\ndashed: the SIGKILL; rings: without the shard")


def size(canvas: Canvas, rows: Sequence[Row]) -> None:
    """Overhead by the size of the tables, checkpoints at one interval in seconds."""
    axes, found = canvas.subplots(), sizes(rows)
    for number, name in enumerate(
        dict.fromkeys(name for by_name in found.values() for name in by_name)
    ):
        points = {held: by_name[name] for held, by_name in found.items() if name in by_name}
        places = sorted(points)
        for place in places:
            axes.plot(
                [place / 1e6] * len(points[place]),
                points[place],
                "o",
                color=COLOURS[number],
                markersize=3.5,
                alpha=0.5,
            )
        axes.plot(
            [place / 1e6 for place in places],
            [statistics.median(points[place]) for place in places],
            "-",
            color=COLOURS[number],
            label=name,
        )
    axes.set_title("Overhead by the size of the tables, embedding-heavy")
    axes.set_xlabel("rows and optimizer state, MB")
    axes.set_ylabel("overhead, %")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    legend(axes)


def model(canvas: Canvas, rows: Sequence[Row]) -> None:
    """MODEL: overhead by the size of the tables, for few and many servers."""
    regime = (
        "embedding-heavy"
        if any(row["regime"] == "embedding-heavy" for row in rows)
        else rows[0]["regime"]
    )
    mine = [row for row in rows if row["regime"] == regime]
    few, many = 5, 100
    panels = canvas.subplots(2, 1, sharex=True)
    for axes, servers in zip(panels, (few, many), strict=True):
        here = [row for row in mine if int(row["servers"]) == servers]
        for number, ((name, minutes), lines) in enumerate(
            groups(
                [row for row in here if "best" not in row["protection"]],
                "protection",
                "interval_minutes",
            ).items()
        ):
            label = f"{name} every {minutes} min" if minutes else name
            axes.plot(
                [int(row["tables_gb"]) for row in lines],
                [100 * float(row["overhead"]) for row in lines],
                "o-",
                color=COLOURS[number % len(COLOURS)],
                markersize=3,
                label=label,
            )
        best = [row for row in here if "best" in row["protection"]]
        axes.plot(
            [int(row["tables_gb"]) for row in best],
            [100 * float(row["overhead"]) for row in best],
            "--",
            color=INK,
            label="checkpoint at its best interval",
        )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(f"MODEL: {servers} servers, {regime}")
        axes.set_ylabel("overhead, %")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:,g}")
            axis.set_minor_formatter(NullFormatter())
    legend(panels[0], columns=2)
    storage, mtbf = (rows[0][field] for field in ("storage_gbit", "server_mtbf_hours"))
    axes.set_xlabel(
        "tables with optimizer state, GB\n"
        f"assumed: {storage} Gbit/s of storage per server,\n"
        f"a server fails every {mtbf} hours"
    )


PROTECTION_FIGURES = {
    "protections": Figure("protections.csv", (WIDTH, 9.5), overhead),
    "protections_lost_progress": Figure("protections.csv", (WIDTH, 9.0), lost_progress),
    "protections_recovering": Figure("protections.csv", (WIDTH, 9.0), recovering),
    "protections_copies": Figure("protections.csv", (WIDTH, 10.0), copies),
    "protections_rebuild": Figure("protections.csv", (WIDTH, 6.0), rebuild),
    "protections_timeline": Figure("protections_timeline.csv", (WIDTH, 9.0), throughput),
    "server-dies": Figure("protections_timeline.csv", (8.0, 4.0), server_dies),
    "protections_size": Figure("protections_size.csv", (WIDTH, 4.2), size),
    "protections_accuracy": Figure("protections_accuracy.csv", (WIDTH, 11.0), accuracy),
    "protections_model": Figure("protections_model.csv", (WIDTH, 8.5), model),
}

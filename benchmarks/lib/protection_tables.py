"""Tables of docs/benchmarks/protections.md: every protection beside every other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lib.contenders import CONTENDERS, SHORT
from lib.ratios import Row
from lib.table_rows import groups, markdown, spread
from lib.versus import (
    auc_differences,
    bars,
    by_round,
    equal_models,
    overheads,
    redundancy,
)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Sorts rows by regime and, within a regime, in the order of lib/contenders.py.

    The CSV file has the rows of a round in the order in which they were run.
    """
    regimes, places = (
        [row["regime"] for row in rows],
        {name: place for place, name in enumerate(CONTENDERS)},
    )
    return sorted(
        rows,
        key=lambda row: (regimes.index(row["regime"]), places.get(row["contender"], len(places))),
    )


def protections(rows: Sequence[Row]) -> list[str]:
    """Every protection by regime: cost without failures and cost of a kill.

    Values are medians over the rounds.
    """
    header = (
        "regime",
        "protection",
        "overhead, %",
        "redundancy / rows",
        "gap, ms",
        "lost progress, ms",
        "total time lost, ms",
        "steps redone or lost",
        "full redundancy restored after, s",
        "samples/s while recovering / undisturbed",
        "runs with the undisturbed model",
    )
    costs, equal = overheads(rows), equal_models(rows)
    columns = [
        (
            {
                key: [factor * value for value in found.values()]
                for key, found in by_round(rows, field).items()
            },
            digits,
        )
        for field, factor, digits in (
            ("gap_ms", 1, 0),
            ("lost_ms", 1, 0),
            ("lost_whole_ms", 1, 0),
            ("redone_steps", 1, 0),
            ("whole_after_s", 1, 2),
            ("kept_recovering", 1, 2),
        )
    ]
    lines = []
    for key, mine in groups(in_order(rows), "regime", "contender").items():
        cost = spread([100 * value for value in costs[key]], 1) if costs.get(key) else "-"
        held = f"{statistics.median(redundancy(row) for row in mine):.2f}"
        cells = [spread(found[key], digits) if found.get(key) else "-" for found, digits in columns]
        if lost := [int(row["lost_steps"]) for row in mine if int(row.get("lost_steps") or 0)]:
            cells[3] += f", {spread(lost)} of a shard lost"
        lines.append(
            (
                *key,
                cost,
                held,
                *cells,
                f"{sum(equal[key])} of {len(equal[key])}" if key in equal else "-",
            )
        )
    return markdown(header, lines)


def protections_short(rows: Sequence[Row]) -> list[str]:
    """The same in few columns."""
    costs, equal = overheads(rows), equal_models(rows)
    lost, whole, kept = (
        by_round(rows, field) for field in ("lost_ms", "lost_whole_ms", "kept_recovering")
    )
    lines = []
    for key, mine in groups(in_order(rows), "regime", "contender").items():
        if key[1] not in SHORT:
            continue
        lines.append(
            (
                *key,
                spread([100 * value for value in costs[key]], 1) if costs.get(key) else "-",
                f"{statistics.median(redundancy(row) for row in mine):.2f}",
                f"{statistics.median(lost[key].values()):,.0f}" if key in lost else "the run ends",
                f"{statistics.median(whole[key].values()):,.0f}" if key in whole else "-",
                f"{statistics.median(kept[key].values()):.2f}" if key in kept else "-",
                "yes" if all(equal.get(key, [False])) else "no",
            )
        )
    return markdown(
        (
            "regime",
            "protection",
            "overhead, %",
            "redundancy / rows",
            "lost progress after a SIGKILL, ms",
            "total time lost, ms",
            "samples/s while recovering / undisturbed",
            "same model",
        ),
        lines,
    )


def protections_size(rows: Sequence[Row]) -> list[str]:
    """What a step costs by the size of the tables, checkpoints at one interval in seconds."""
    lines = [
        (f"{held / 1e6:,.0f}", name, spread(costs, 1))
        for held, by_name in sizes(rows).items()
        for name, costs in by_name.items()
    ]
    return markdown(("rows, MB", "protection", "overhead, %"), lines)


def sizes(rows: Sequence[Row]) -> dict[int, dict[str, list[float]]]:
    """Reads protections_size.csv: {bytes of rows: {contender: overhead in %, of each round}}.

    The sizes ascend.
    """
    found: dict[int, dict[str, list[float]]] = {}
    for row in sorted(rows, key=lambda row: float(row["share"])):
        found.setdefault(int(row["rows_bytes"]), {}).setdefault(row["contender"], []).append(
            100 * float(row["overhead"])
        )
    return found


def protections_accuracy(rows: Sequence[Row]) -> list[str]:
    """AUC at the end of runs in which a server was killed."""
    found = auc_differences(rows)
    return markdown(
        ("regime", "protection", "final AUC minus that of none"),
        ((*key, f"{value:+.4f}") for key, value in found.items() if key[1] != "none"),
    )


def protections_bars(rows: Sequence[Row]) -> list[str]:
    """The bars, and what was found."""
    return markdown(
        ("regime", "what is measured", "median (range)", "target", "verdict"),
        (
            (
                bar.regime,
                bar.what,
                spread(bar.values, 3),
                f"{'at least' if bar.at_least else 'below'} {bar.bar:g}",
                bar.verdict,
            )
            for bar in bars(rows)
        ),
    )


def protections_bytes(rows: Sequence[Row]) -> list[str]:
    """What each protection sends, writes and holds."""
    calm = {
        row["regime"]: float(row["sent_bytes_per_step"])
        for row in rows
        if row["contender"] == "none"
    }
    lines = []
    for row in rows:
        sent, held = float(row["sent_bytes_per_step"]), float(row["rows_bytes"])
        over = f"{sent / calm[row['regime']]:.2f}" if calm.get(row["regime"]) else "-"
        written = (
            f"{float(row['written_bytes_per_step']) / 1e6:,.2f}"
            if row["written_bytes_per_step"] != ""
            else "a checkpoint per interval"
        )
        lines.append(
            (
                row["regime"],
                row["contender"],
                f"{sent / 1e6:,.2f}",
                over,
                written,
                f"{float(row['redundancy_bytes']) / held:.2f}",
                f"{float(row['undo_bytes']) / 1e6:,.1f}",
                f"{float(row['peak_bytes']) / 1e6:,.0f}",
            )
        )
    header = (
        "regime",
        "protection",
        "sent per step, MB",
        "sent / sent with none",
        "written per step, MB",
        "redundancy / rows",
        "undo log, MB",
        "peak memory of all ranks, MB",
    )
    return markdown(header, lines)


def protections_model(rows: Sequence[Row]) -> list[str]:
    """MODEL: overhead of tables of 1 TB."""
    shown = [
        row for row in rows if row["tables_gb"] == "1000" and row["servers"] in ("5", "50", "500")
    ]
    return markdown(
        (
            "MODEL: regime",
            "servers",
            "protection",
            "checkpoint interval, min",
            "overhead, %",
            "of which without failures, %",
            "lost progress per failure, s",
        ),
        (
            (
                row["regime"],
                row["servers"],
                row["protection"],
                row["interval_minutes"] or "-",
                f"{100 * float(row['overhead']):.2f}",
                f"{100 * float(row['normal_overhead']):.2f}",
                f"{float(row['lost_seconds_per_failure']):,.1f}",
            )
            for row in shown
        ),
    )

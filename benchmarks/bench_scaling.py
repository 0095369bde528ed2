"""How a protected step changes with tables, servers, k and m, and what a kill costs.

    python benchmarks/bench_scaling.py                     # three rounds
    python benchmarks/bench_scaling.py --series rebuild    # one series; the CSV keeps the others
    python benchmarks/bench_scaling.py --smoke             # one point and one kill; for the tests

The model is embedding-heavy, with 2,048 samples per slot. Each series is compared with its own
first point in the same round:
  tables    Rows of every table grow from 1x to 100x; samples stay the same. The slow-down of a step
            must not exceed the growth of its rows. Tables are pre-touched (lib/pre_touched.py).
            The CSV has how many different rows a batch has: ids that meet in one row of a small
            table do not meet in a large one.
  servers   3 to 12 servers with 2 trainers, (2,1): what a step costs all ranks must not grow.
  k         2 to 8 at m = 1, 10 servers.
  m         1 to 3 at k = 4, 10 servers.
  rebuild   A server is killed: samples/s while rebuilding over those before, and the gap. Of the
            gap it tells detection (by the rank that reports) and recovery.
Writes benchmarks/results/scaling.csv.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ecrm.data.dataset import CriteoDataset
from ecrm.drill.drill_runs import read_run
from ecrm.drill.throughput import before_during_after
from lib import measure, tables
from lib.pre_touched import pre_touch


@dataclass(frozen=True)
class Size:
    """How much is run.

    Rounds, steps, rows, (series, value, settings) of each run of a round, settings of the killed
    run and of all.
    """

    rounds: int
    steps: int
    rows: int
    points: tuple[tuple[str, int, dict[str, Any]], ...]
    killed: dict[str, Any]
    sets: dict[str, Any]


FULL = Size(
    rounds=3,
    steps=80,
    rows=500_000,
    points=(
        *(
            (
                "tables",
                rows,
                {"cluster.servers": 5, "protection.k": 4, "model.max_rows_per_table": rows},
            )
            for rows in (6_000, 60_000, 600_000)
        ),
        *(
            ("servers", servers, {"cluster.servers": servers, "protection.k": 2})
            for servers in (3, 6, 9, 12)
        ),
        *(("k", k, {"cluster.servers": 10, "protection.k": k}) for k in (2, 4, 6, 8)),
        *(
            ("m", m, {"cluster.servers": 10, "protection.k": 4, "protection.m": m})
            for m in (1, 2, 3)
        ),
    ),
    killed={"cluster.servers": 5, "protection.k": 4, "protection.rebuild_rows_per_step": 1024},
    sets={"train.global_batch": 4096, "train.slots": 2, "cluster.trainers": 2},
)
SMOKE = Size(
    rounds=1,
    steps=12,
    rows=12_000,
    points=(
        ("tables", 500, {"cluster.servers": 2, "protection.k": 1, "model.max_rows_per_table": 500}),
        ("servers", 2, {"cluster.servers": 2, "protection.k": 1}),
    ),
    killed={"cluster.servers": 2, "protection.k": 1},
    sets={
        "model.max_rows_per_table": 1000,
        "model.dense_arch": "native",
        "train.global_batch": 64,
        "train.slots": 1,
        "cluster.trainers": 1,
        "cluster.layout": "colocated",
    },
)


SERIES = ("tables", "servers", "k", "m", "rebuild")


def settings(data: Path, steps: int, size: Size) -> dict[str, Any]:
    """What all runs share."""
    return {
        **measure.REGIMES["embedding-heavy"],
        "data.path": str(data),
        "data.eval_fraction": 0.01,
        "train.steps": steps,
        "train.epochs": 0,
        "train.log_every_steps": 10,
        "storage.prefault": True,
        "cluster.spares": 0,
        "protection.m": 1,
        "protection.verify_parity_at_end": False,
        **size.sets,
    }


def undisturbed(folder: Path, sets: dict[str, Any], pre_touched: Path | None) -> dict[str, Any]:
    """An undisturbed run; its first half of steps is not counted.

    Tables are pre-touched where there is a folder for such data.
    """
    skipped = 0
    if pre_touched is not None:
        skipped = pre_touch(
            Path(sets["data.path"]),
            pre_touched,
            sets["model.max_rows_per_table"],
            sets["train.global_batch"],
        )
        sets = {**sets, "data.path": str(pre_touched), "train.steps": skipped + sets["train.steps"]}
    first = skipped + (sets["train.steps"] - skipped) // 2
    measure.run(folder, sets)
    finished = [time for step, time in read_run(folder).finished if step >= first]
    found = {
        "step_ms": 1e3 * statistics.median(after - before for before, after in pairwise(finished))
    }
    return found if pre_touched is None else {**found, "rows_per_step": rows_per_step(sets, first)}


def rows_per_step(sets: dict[str, Any], first: int) -> float:
    """Different rows in the batch of an average step from `first` on, in all tables together."""
    data = CriteoDataset.open(
        sets["data.path"], sets["model.max_rows_per_table"], sets["data.eval_fraction"]
    )
    batches = (
        data.batch_for(step, 0, 1, sets["train.global_batch"])[1]
        for step in range(first, sets["train.steps"])
    )
    return statistics.mean(sum(table.unique().numel() for table in ids.T) for ids in batches)


def killed(folder: Path, sets: dict[str, Any], step: int) -> dict[str, Any]:
    """Server 1 dies and a spare takes over: the gap, and throughput kept while rebuilding."""
    measure.run(folder, {**sets, "cluster.spares": 1}, [f"1@{step}:parity"])
    record = read_run(folder)
    pace = before_during_after(record, sets["train.global_batch"])
    (failure,) = record.failures
    step_seconds = record.summary["step_seconds"]["p50"]
    before, during = pace["before"].samples_per_second, pace["during"].samples_per_second
    if not before or not during:
        sys.exit(f"too few steps to see throughput before the kill and while rebuilding: {pace}")
    return {
        "step_ms": 1e3 * step_seconds,
        "gap_ms": 1e3 * failure.stall_seconds,
        "noticing_ms": 1e3 * (failure.noticed_at - failure.killed_at),
        "recovery_ms": 1e3 * failure.recovery_seconds,
        "kept_while_rebuilding": during / before,
    }


def main(words: Sequence[str] | None = None) -> None:
    """Run every series in rounds, write the CSV, print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help=f"default {FULL.rounds}")
    parser.add_argument("--steps", type=int, help=f"default {FULL.steps}")
    parser.add_argument("--series", choices=SERIES, action="append", help="default: all")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--data", type=Path, help="folder to keep the generated data in")
    parser.add_argument(
        "--output", type=Path, help="the CSV; default: benchmarks/results/scaling.csv"
    )
    arguments = parser.parse_args(words)
    size = SMOKE if arguments.smoke else FULL
    rounds, steps = arguments.rounds or size.rounds, arguments.steps or size.steps
    about, wanted = measure.device(), arguments.series or SERIES
    target = measure.target("scaling.csv", arguments.output, arguments.smoke)
    try:
        rows: list[dict[str, Any]] = [
            row for row in tables.read_rows(target) or () if row["series"] not in wanted
        ]
    except tables.TableError as error:
        sys.exit(str(error))
    with tempfile.TemporaryDirectory() as scratch:
        data = measure.prepare(arguments.data or Path(scratch), size.rows, measure.ZIPF)
        shared = settings(data, steps, size)
        for number in range(rounds):
            for series, value, sets in (point for point in size.points if point[0] in wanted):
                pre_touched = Path(scratch) / f"pre-touched-{value}" if series == "tables" else None
                found = undisturbed(
                    Path(scratch) / f"{number}-{series}-{value}", {**shared, **sets}, pre_touched
                )
                rows.append(_row(number, series, value, found, about))
            if "rebuild" in wanted:
                found = killed(
                    Path(scratch) / f"{number}-killed",
                    {**shared, **size.killed, "train.steps": 4 * steps},
                    steps,
                )
                rows.append(_row(number, "rebuild", 1, found, about))
    measure.write_csv(target, rows)
    print("\n".join([*tables.scaling(rows), "", *tables.rebuilding(rows)]))
    print(f"written to {target}")


def _row(
    number: int, series: str, value: int, found: dict[str, Any], about: dict[str, Any]
) -> dict[str, Any]:
    fields = (
        "step_ms",
        "rows_per_step",
        "gap_ms",
        "noticing_ms",
        "recovery_ms",
        "kept_while_rebuilding",
    )
    shown = {name: "" if found.get(name) is None else round(found[name], 3) for name in fields}
    row = {"series": series, "value": value, "round": number, **shown, **about}
    print(json.dumps({key: row[key] for key in ("series", "value", "round", *fields)}), flush=True)
    return row


if __name__ == "__main__":
    main()

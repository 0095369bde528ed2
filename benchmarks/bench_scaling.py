"""How a protected step changes with the tables, the servers, k and m, and what a kill costs; embedding-heavy.

    python benchmarks/bench_scaling.py            # about half an hour on 2 cores
    python benchmarks/bench_scaling.py --smoke    # a minute, tiny; what the tests run

Series, each against its own first point in the same round:
  tables    rows of all tables together, 1x to 100x, the same batches: a step must not get slower
  servers   3 to 12 servers with 2 trainers, (2,1): what a step costs all ranks together must not grow
  k         2 to 8 at m = 1, 10 servers
  m         1 to 3 at k = 4, 10 servers
  rebuild   a server killed: samples/s while rebuilding over those before, and the gap in steps
Writes benchmarks/results/scaling.csv.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure

from ecrm.drill.run import read_run
from ecrm.drill.throughput import before_during_after

GLOBAL_BATCH = 2048
TRAINERS = 2


def points() -> Iterator[tuple[str, float, dict[str, Any]]]:
    """(series, value, settings) of every run of a round."""
    for rows in (10_000, 100_000, 1_000_000):
        yield "tables", rows, {"cluster.servers": 5, "protection.k": 4, "model.max_rows_per_table": rows}
    for servers in (3, 6, 9, 12):
        yield "servers", servers, {"cluster.servers": servers, "protection.k": 2}
    for k in (2, 4, 6, 8):
        yield "k", k, {"cluster.servers": 10, "protection.k": k}
    for m in (1, 2, 3):
        yield "m", m, {"cluster.servers": 10, "protection.k": 4, "protection.m": m}


def settings(data: Path, steps: int, smoke: bool) -> dict[str, Any]:
    """What all runs share."""
    return {
        **measure.REGIMES["embedding-heavy"],
        "data.path": str(data),
        "data.eval_fraction": 0.01,
        "model.max_rows_per_table": 1000 if smoke else 500_000,
        "train.steps": steps,
        "train.epochs": 0,
        "train.global_batch": 64 if smoke else GLOBAL_BATCH,
        "train.slots": TRAINERS,
        "train.log_every_steps": 10,
        "cluster.trainers": TRAINERS,
        "cluster.spares": 0,
        "protection.m": 1,
        "protection.verify_parity_at_end": False,
    }


def killed(folder: Path, sets: dict[str, Any], step: int) -> dict[str, Any]:
    """A run in which server 1 dies: gap in steps before it, share of throughput kept while rebuilding."""
    sets = {**sets, "cluster.servers": 5, "protection.k": 4, "cluster.spares": 1}
    measure.run(folder, sets, [f"1@{step}:parity"])
    record = read_run(folder)
    pace = before_during_after(record, sets["train.global_batch"])
    (failure,) = record.summary["failures"]
    step_seconds = record.summary["step_seconds"]["p50"]
    before, during = pace["before"].samples_per_second, pace["during"].samples_per_second
    return {
        "step_ms": 1e3 * step_seconds,
        "gap_ms": 1e3 * failure["stall_seconds"],
        "recovery_ms": 1e3 * failure["recovery_seconds"],
        "kept_while_rebuilding": during / before if before and during else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--data", type=Path, help="folder to keep the generated data in")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rounds, steps = (1, 12) if arguments.smoke else (arguments.rounds, arguments.steps)
    about = measure.device()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        data = measure.prepare(arguments.data or Path(scratch), 20_000 if arguments.smoke else 500_000)
        shared = settings(data, steps, arguments.smoke)
        wanted = list(points())[::8] if arguments.smoke else list(points())
        for number in range(rounds):
            for series, value, sets in wanted:
                sets = {**shared, **({} if arguments.smoke and series == "tables" else sets)}
                folder = Path(scratch) / f"{number}-{series}-{value}"
                summary = measure.run(folder, {**shared, **sets})
                row = {"step_ms": 1e3 * summary["step_seconds"]["p50"]}
                rows.append(_row(number, series, value, row, about))
            row = killed(Path(scratch) / f"{number}-killed", {**shared, "train.steps": 3 * steps}, steps // 2)
            rows.append(_row(number, "rebuild", 1, row, about))
    measure.write_csv(arguments.output or measure.RESULTS / "scaling.csv", rows)
    for series in dict.fromkeys(row["series"] for row in rows):
        mine = [row for row in rows if row["series"] == series]
        for value in dict.fromkeys(row["value"] for row in mine):
            middle = statistics.median(row["step_ms"] for row in mine if row["value"] == value)
            print(f"{series:>8} {value:>9,}: {middle:8.1f} ms a step")


def _row(number: int, series: str, value: float, found: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    fields = ("step_ms", "gap_ms", "recovery_ms", "kept_while_rebuilding")
    shown = {name: "" if found.get(name) is None else round(found[name], 3) for name in fields}
    row = {"series": series, "value": value, "round": number, **shown, **about}
    print(json.dumps({key: row[key] for key in ("series", "value", "round", *fields)}), flush=True)
    return row


if __name__ == "__main__":
    main()

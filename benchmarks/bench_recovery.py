"""What a SIGKILL costs: the gap between two steps, throughput around it, and time to rebuild.

Each scenario is real training under mpirun on generated Criteo rows, run several times; the numbers
come from events.jsonl. Writes every run to benchmarks/results/recovery.csv and prints the table:
medians with the least and the greatest. `--smoke` is one scenario, once, on a small model, to a
temporary file.

`--rebuild` measures rebuilding alone, to benchmarks/results/rebuild_pace.csv: one of 4 or 12
servers dies with every row updated before, and rows come back in 5 % of time or 4,096 a step, in
turn. Steps are short, with hardly any dense part, or ten times as long, with a dense part that
keeps two trainers and both cores busy. Beside the seconds per GB stands a floor: the bytes of a GB
read, copied, decoded and written by this machine's kernels on all cores, within the same share of
time.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ecrm.base.wording import counted
from ecrm.drill.drill_runs import read_run
from ecrm.drill.throughput import before_during_after, pace, spans
from ecrm.kernels.decode import decode
from lib import measure, tables
from lib.pre_touched import pre_touch

SCENARIOS: dict[str, tuple[tuple[str, ...], tuple[tuple[int, str], ...]]] = {
    "server, spare takes over": (("cluster.spares=1",), ((1, "parity"),)),
    "server, trainer adopts": (("cluster.spares=0",), ((1, "parity"),)),
    "trainer, spare takes over": (("cluster.spares=1",), ((4, "backward"),)),
    "two servers at once, m = 2": (
        ("cluster.spares=2", "protection.k=2", "protection.m=2"),
        ((1, "parity"), (2, "parity")),
    ),
    "server, commit every 8 steps": (
        ("cluster.spares=1", "protection.commit_interval=8"),
        ((1, "update"),),
    ),
    "server and trainer in one, colocated": (
        ("cluster.spares=1", "cluster.layout=colocated"),
        ((1, "parity"),),
    ),
}
"""Per scenario, what differs from quickstart, and (rank, phase) of each kill."""


@dataclass(frozen=True)
class Size:
    """How much is run: repeats of each scenario, steps, the step of the kills, generated rows."""

    repeats: int
    steps: int
    kill_at: int
    rows: int
    global_batch: int
    sets: tuple[str, ...] = ()


# Rebuilding takes some tens of steps (17 in a run with m = 1): 240 leave more than 100 after it.
FULL = Size(repeats=5, steps=240, kill_at=60, rows=200_000, global_batch=1024)
SMOKE = Size(
    1,
    40,
    10,
    4_000,
    64,
    ("model.max_rows_per_table=500", "cluster.servers=2", "cluster.trainers=1", "protection.k=1"),
)


@dataclass(frozen=True)
class Steps:
    """The steps of a run whose rebuilding is measured, and how rows come back.

    `after` is the number of steps from the kill on.
    """

    trainers: int
    top_mlp: tuple[int, ...]
    after: int
    paces: tuple[str, ...]


@dataclass(frozen=True)
class Rebuilds:
    """How rebuilding is measured: repeats, rows of each table, samples, steps before the kill.

    `samples` are generated rows of data, `servers` pairs of servers and k.
    """

    repeats: int
    rows: int
    batch: int
    samples: int
    before: int
    servers: tuple[tuple[int, int], ...]
    steps: tuple[Steps, ...]


SHARE, ROWS = "5 % of time", "4,096 rows a step"
SHORT = Steps(1, (64, 1), 900, (SHARE, ROWS))
LONG = Steps(2, (2048, 2048, 1), 240, (SHARE,))
REBUILDS = Rebuilds(3, 60_000, 256, 60_000, 40, ((4, 3), (12, 4)), (SHORT, LONG))
"""A shard of 4 servers has 137 MB with its parity, of 12 servers 43 MB."""
SMOKE_REBUILDS = Rebuilds(1, 500, 64, 4_000, 5, ((3, 2),), (replace(SHORT, after=60),))
LONGEST_REBUILDS = 840.0
"""Seconds for all runs of `--rebuild`: a repeat that would end later does not begin."""
PACES: dict[str, dict[str, Any]] = {
    SHARE: {"protection.rebuild_share": 0.05, "protection.rebuild_rows_per_step": 0},
    ROWS: {
        "protection.rebuild_share": 1,
        "protection.rebuild_rows_per_step": 4096,
    },
}
DIMENSION = 64
RECORD = 4 * (DIMENSION + 2)

FIELDS = (
    "scenario",
    "repeat",
    "gap_ms",
    "recovery_ms",
    "redone_steps",
    "step_ms",
    "samples_per_second_before",
    "samples_per_second_during",
    "samples_per_second_after",
    "rebuild_seconds",
    "rebuilt_bytes",
    "on_demand_rows",
    "model_sha256",
    "ranks",
    "device",
    "cores",
    "torch",
    "openmpi",
    "ecrm_commit",
)


def run(name: str, repeat: int, data: Path, folder: Path, size: Size) -> dict[str, object]:
    """One run of a scenario as a row of the CSV; ends the program where it cannot be measured."""
    sets, kills = SCENARIOS[name]
    words = ["launch", "quickstart", "--run-dir", str(folder)]
    for one in (
        f"data.path={data}",
        f"train.steps={size.steps}",
        f"train.global_batch={size.global_batch}",
        "train.log_every_steps=10",
        "model.dense_arch=native",
        "protection.verify_parity_at_end=true",
        *size.sets,
        *sets,
    ):
        words += ["--set", one]
    for rank, phase in kills:
        words += ["--kill", f"{rank}@{size.kill_at}:{phase}"]
    measure.ecrm(*words)
    record = read_run(folder)
    pace = before_during_after(record, size.global_batch)
    failures = record.summary["failures"]
    dead = sorted(rank for failure in failures for rank in failure["ranks"])
    if dead != sorted(rank for rank, _ in kills):
        sys.exit(f"{name}: ranks {dead} died, not what was to be measured")
    if not all(pace[when].steps for when in ("before", "during", "after")):
        sys.exit(f"{name}: too few steps to see throughput before, during and after: {pace}")
    return {
        "scenario": name,
        "repeat": repeat,
        "gap_ms": round(1000 * sum(failure["stall_seconds"] for failure in failures), 1),
        "recovery_ms": round(1000 * sum(failure["recovery_seconds"] for failure in failures), 1),
        "redone_steps": sum(failure["redone_steps"] for failure in failures),
        "step_ms": round(1000 * record.summary["step_seconds"]["p50"], 1),
        **{
            f"samples_per_second_{when}": round(pace[when].samples_per_second)
            for when in ("before", "during", "after")
        },
        "rebuild_seconds": round(max(failure["rebuild_seconds"] for failure in failures), 3),
        "rebuilt_bytes": sum(failure["rebuilt_bytes"] for failure in failures),
        "on_demand_rows": sum(failure["on_demand_rows"] for failure in failures),
        "model_sha256": record.summary["model_sha256"],
        "ranks": record.summary["world_size"],
        **measure.device(),
    }


def rebuild(
    servers: int,
    k: int,
    steps: Steps,
    name: str,
    repeat: int,
    data: Path,
    folder: Path,
    size: Rebuilds,
) -> dict[str, object]:
    """One run with a death among servers whose rows are all updated, as a row of the CSV."""
    touched = pre_touch(data, data.with_name(f"{data.name}-touched"), size.rows, size.batch)
    kill = touched + size.before
    measure.run(
        folder,
        {
            "model.embedding_dim": DIMENSION,
            "model.bottom_mlp": [DIMENSION],
            "model.top_mlp": list(steps.top_mlp),
            "model.dense_arch": "native",
            "model.max_rows_per_table": size.rows,
            "data.path": str(data.with_name(f"{data.name}-touched")),
            "data.eval_fraction": 0.01,
            "train.epochs": 0,
            "train.steps": kill + steps.after,
            "train.global_batch": size.batch,
            "train.slots": steps.trainers,
            "cluster.trainers": steps.trainers,
            "cluster.servers": servers,
            "cluster.spares": 1,
            "protection.k": k,
            "protection.m": 1,
            "protection.verify_parity_at_end": False,
            "storage.prefault": True,
            "train.log_every_steps": 10 if steps.trainers == 1 else 1,
            **PACES[name],
        },
        [f"1@{kill}:parity"],
    )
    record = read_run(folder)
    (failure,) = record.failures
    noticed, whole = failure.noticed_at, failure.whole_at
    if noticed is None or whole is None:
        sys.exit(f"{servers} servers, {name}: the rebuild did not end within the run")
    resumed = noticed + (failure.stall_seconds or 0.0)
    every = spans(record)
    during = pace([each for each in every if resumed < each.begin and each.end < whole], None)
    after = pace([each for each in every if each.begin > whole], None)
    if not during.steps_per_second or not after.steps_per_second:
        sys.exit(f"{servers} servers, {name}: too few steps while rebuilding or afterwards")
    share = PACES[name]["protection.rebuild_share"]
    seconds = floor_seconds(k) / (os.cpu_count() or 1)
    return {
        "servers": servers,
        "k": k,
        "trainers": steps.trainers,
        "pace": name,
        "repeat": repeat,
        "seconds_per_gb": round((whole - resumed) / (failure.lost_bytes / 1e9), 2),
        "floor_seconds_per_gb": round(seconds / share, 2),
        "kept": round(during.steps_per_second / after.steps_per_second, 3),
        "steps_rebuilding": during.steps,
        "step_ms": round(1e3 / after.steps_per_second, 2),
        "rebuilt_bytes": failure.lost_bytes,
        "on_demand_rows": failure.on_demand_rows,
        "model_sha256": record.summary["model_sha256"],
        **measure.device(),
    }


def floor_seconds(k: int, rows: int = 1 << 15) -> float:
    """Seconds of one core for a GB of lost records, from the bytes alone.

    k units are read at random rows, copied once, and decoded; the result is copied and written.
    """
    torch.set_num_threads(1)
    records = torch.randint(256, (8 * rows, RECORD), dtype=torch.uint8)
    chosen = torch.randperm(8 * rows)[:rows].sort().values
    units = [records[chosen] for _ in range(k)]
    matrix = torch.arange(1, k + 1, dtype=torch.uint8).view(1, k)
    read = _best(lambda: torch.index_select(records, 0, chosen))
    copied = _best(units[0].clone)
    decoded = _best(lambda: decode(units, matrix))
    written = _best(lambda: records.index_copy_(0, chosen, units[0]))
    return (k * (read + copied) + decoded + copied + written) / (rows * RECORD / 1e9)


def _best(call: Callable[[], object]) -> float:
    """The shortest of nine calls, in seconds: a floor has no other process in it."""
    found = []
    for _ in range(9):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def rebuilds(repeats: int | None, csv: Path | None, smoke: bool) -> None:
    """Measure rebuilding in turns, write the CSV, print the table."""
    size = SMOKE_REBUILDS if smoke else REBUILDS
    rows, began = list[dict[str, object]](), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        data = measure.prepare(Path(scratch), size.samples, measure.ZIPF)
        for repeat in range(repeats or size.repeats):
            if repeat and (time.monotonic() - began) * (repeat + 1) / repeat > LONGEST_REBUILDS:
                print(f"{counted(repeat, 'repeat')}: one more would need too long")
                break
            for (servers, k), steps in product(size.servers, size.steps):
                for name in steps.paces:
                    folder = Path(scratch) / f"{servers}-{len(rows)}"
                    rows.append(rebuild(servers, k, steps, name, repeat, data, folder, size))
                    print(rows[-1], flush=True)
    for trainers in {row["trainers"] for row in rows}:
        hashes = {row["model_sha256"] for row in rows if row["trainers"] == trainers}
        if len(hashes) != 1:
            sys.exit(f"the finished models of {trainers} trainers differ: {hashes}")
    target = measure.target("rebuild_pace.csv", csv, smoke)
    measure.write_csv(target, rows)
    print("\n".join(tables.rebuild_pace(rows)))
    print("one model_sha256 over all runs with the same steps")
    print(f"written to {target}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the scenarios, write the CSV, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--rebuild", action="store_true", help="rebuilding alone")
    parser.add_argument("--repeats", type=int, help="default 5, with --rebuild 3")
    parser.add_argument(
        "--csv",
        type=Path,
        help="where to write; default: recovery.csv or rebuild_pace.csv of benchmarks/results",
    )
    options = parser.parse_args(arguments)
    if options.rebuild:
        rebuilds(options.repeats, options.csv, options.smoke)
        return
    names, size, repeats = list(SCENARIOS), FULL, options.repeats or FULL.repeats
    if options.smoke:
        names, size, repeats = names[:1], SMOKE, SMOKE.repeats
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        data = measure.prepare(Path(scratch), size.rows)
        # scenarios in turn, so that a slow spell of the machine hits all of them
        for repeat in range(repeats):
            for number, name in enumerate(names):
                rows.append(run(name, repeat, data, Path(scratch) / f"{number}-{repeat}", size))
    hashes = {row["model_sha256"] for row in rows}
    if len(hashes) != 1:
        sys.exit(f"the finished models differ: {hashes}")
    target = measure.target("recovery.csv", options.csv, options.smoke)
    measure.write_csv(target, rows)
    print("\n".join(tables.recovery(rows)))
    print(f"one model_sha256 over all {len(rows)} runs: {hashes.pop()}")
    print(f"written to {target}")


if __name__ == "__main__":
    main()

"""What a SIGKILL costs: the gap between two steps, throughput around it, and time to rebuild.

Each scenario is real training under mpirun on generated Criteo rows, run several times; the numbers
come from events.jsonl. Writes every run to benchmarks/results/recovery.csv and prints the table:
medians with the least and the greatest. `--smoke` is one scenario, once, on a small model, to a
temporary file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ecrm.drill.drill_runs import read_run
from ecrm.drill.throughput import before_during_after
from lib import measure, tables

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the scenarios, write the CSV, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--repeats", type=int, default=FULL.repeats)
    parser.add_argument(
        "--csv", type=Path, help="where to write; default: benchmarks/results/recovery.csv"
    )
    options = parser.parse_args(arguments)
    names, size, repeats = list(SCENARIOS), FULL, options.repeats
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

"""What ranks had best do where they outnumber the cores of their host (cluster.oversubscribed).

    python benchmarks/bench_oversubscribed.py            # 10 minutes; needs fewer cores than ranks
    python benchmarks/bench_oversubscribed.py --smoke    # one layout, tiny; what the tests run

The model is embedding-heavy, with 2,048 samples per slot. Three runs are interleaved
(lib/interleaved.py), for several layouts: one binds its ranks to cores, in one they sleep while
they wait, in one they poll. `auto` says which of these the config's default is. Ratios are to
`bind`, turn by turn. Writes benchmarks/results/oversubscribed.csv.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import measure, tables
from lib.interleaved import Beside, RunFailed, run_interleaved

MANNERS = ("bind", "sleep", "poll")


@dataclass(frozen=True)
class Size:
    """How much is run.

    Rounds, steps before the first turn, turns, seconds of each turn, rows, samples of a slot,
    (layout, servers, trainers) of each run, and what else is set.
    """

    rounds: int
    warm_steps: int
    turns: int
    seconds: float
    rows: int
    slot_batch: int
    layouts: tuple[tuple[str, int, int], ...]
    sets: dict[str, Any]


FULL = Size(
    rounds=1,
    warm_steps=60,
    turns=8,
    seconds=1.5,
    rows=500_000,
    slot_batch=2048,
    layouts=(
        ("colocated", 3, 3),
        ("colocated", 4, 4),
        ("colocated", 5, 5),
        ("dedicated", 3, 2),
        ("dedicated", 3, 3),
        ("dedicated", 5, 2),
        ("dedicated", 12, 2),
    ),
    sets={"protection.k": 2},
)
SMOKE = Size(
    rounds=1,
    warm_steps=8,
    turns=2,
    seconds=0.5,
    rows=12_000,
    slot_batch=64,
    layouts=(("colocated", 3, 3),),
    sets={"protection.k": 1, "model.max_rows_per_table": 1000},
)


def settings(data: Path, layout: str, servers: int, trainers: int, size: Size) -> dict[str, Any]:
    """The config of one layout, what ranks do while they wait left out."""
    return {
        **measure.REGIMES["embedding-heavy"],
        "data.path": str(data),
        "data.eval_fraction": 0.01,
        "train.epochs": 0,
        "train.global_batch": trainers * size.slot_batch,
        "storage.prefault": True,
        "cluster.layout": layout,
        "cluster.servers": servers,
        "cluster.trainers": trainers,
        "cluster.spares": 0,
        "protection.m": 1,
        "protection.verify_parity_at_end": False,
        **size.sets,
    }


def auto(folder: Path, sets: dict[str, Any]) -> str:
    """What `cluster.oversubscribed = "auto"` does; empty where there are cores enough."""
    return measure.run(folder, {**sets, "train.steps": 2})["oversubscribed"] or ""


def main(words: Sequence[str] | None = None) -> None:
    """Run every layout in rounds, write the CSV, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help=f"default {FULL.rounds}")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--data", type=Path, help="folder to keep the generated data in")
    parser.add_argument(
        "--output", type=Path, help="the CSV; default: benchmarks/results/oversubscribed.csv"
    )
    arguments = parser.parse_args(words)
    size = SMOKE if arguments.smoke else FULL
    target = measure.target("oversubscribed.csv", arguments.output, arguments.smoke)
    about, rows = measure.device(), []
    with tempfile.TemporaryDirectory() as scratch:
        data = measure.prepare(arguments.data or Path(scratch), size.rows, measure.ZIPF)
        for number in range(arguments.rounds or size.rounds):
            for layout, servers, trainers in size.layouts:
                sets = settings(data, layout, servers, trainers, size)
                chosen = auto(Path(scratch) / f"{number}-{layout}-{servers}-{trainers}", sets)
                if not chosen and not arguments.smoke:
                    sys.exit(
                        f"{layout} with {servers} servers and {trainers} trainers does not "
                        f"outnumber the {about['cores']} cores: bind this program to fewer"
                    )
                try:
                    found = run_interleaved(
                        {name: {**sets, "cluster.oversubscribed": name} for name in MANNERS},
                        Path(scratch),
                        size.warm_steps,
                        size.turns,
                        size.seconds,
                    )
                except (RunFailed, ValueError) as error:
                    sys.exit(str(error))
                for name, steps in found.items():
                    rows.append(
                        {
                            "layout": layout,
                            "servers": servers,
                            "trainers": trainers,
                            "round": number,
                            "manner": name,
                            "auto": chosen,
                            "step_ms": round(1e3 * statistics.median(steps), 2),
                            "over_bind_in_turns": round(
                                1 + Beside(steps, found["bind"]).overhead, 4
                            ),
                            **about,
                        }
                    )
                    print(
                        f"{layout} {servers}+{trainers} {name:<6} {rows[-1]['step_ms']:8.1f} ms, "
                        f"{rows[-1]['over_bind_in_turns']:.3f} of bind",
                        flush=True,
                    )
    measure.write_csv(target, rows)
    print("\n".join(tables.oversubscribed(rows)))
    print(f"written to {target}")


if __name__ == "__main__":
    main()

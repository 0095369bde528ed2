"""What protection costs a step, and how a protected step compares with TorchRec's unprotected one.

    python benchmarks/bench_step.py            # 5 rounds of 25 minutes on 2 cores
    python benchmarks/bench_step.py --smoke    # tiny, to a temporary file; what the tests run

Contenders of one round run one after the other in a random order. They have the same processes,
model, batches and data:
  none         ECRM without protection
  erasure      k=4 m=1, a commit every step
  erasure-16   k=4 m=1, a commit every 16 steps
  torchrec-*   TorchRec DistributedModelParallel over gloo (benchmarks/peer_torchrec.py),
               unprotected: by sharding plan, with and without TorchRec's own pipelining, its
               processes free or each bound to a core

ECRM computes the interaction by its own kernel (model.dense_arch = native, the default), TorchRec
by its own module; the model is the same. Samples per second are the global batch over the median
step of the last third of 240 steps. Before, memory is touched for the first time and allocators
grow: logs of 16 steps take 150 steps to find their places.

Memory is treated alike. All tables are in memory before the first step, in huge pages: TorchRec
writes its initial values there, ECRM is told storage.prefault. Both keep what they free: ECRM by
itself, TorchRec's processes by MALLOC_ and GLIBC_ variables.

Ratios are of the same round, then their median. At the end of a round ECRM's contenders are
interleaved (lib/interleaved.py): the pace of a shared machine changes by more than they differ.

All begin with the same values and see the same batches. The CSV has their training losses. They
are the same bits with and without protection. TorchRec's differ by rounding, which grows with every
step. With column-wise sharding they also differ by the optimizer, which has a state for each part
of a row.

In the end `none`, `erasure` and `erasure-16` run once more with train.profile, to show where the
milliseconds of a step go. Writes step.csv and step_phases.csv in benchmarks/results. With --regime,
they keep what they say of the other regime.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ecrm.drill.drill_runs import read_run
from ecrm.run.reading import parse_events
from lib import measure, tables
from lib.interleaved import TELLS_OFTEN, Beside, RunFailed, run_interleaved
from lib.ratios import STEP_BARS, step_ratios
from lib.step_phases import phases
from lib.torchrec_peer import ENVIRONMENT, peer_words

PROTECTION = {
    "none": {"protection.name": "none"},
    "erasure": {"protection.m": 1},
    "erasure-16": {"protection.m": 1, "protection.commit_interval": 16},
}

PROFILED = ("none", "erasure", "erasure-16")


@dataclass(frozen=True)
class Size:
    """How much is run.

    Rounds, steps, generated rows, ranks, samples of a slot by regime, k, who takes part, turns of
    each of ECRM's contenders, steps of a turn and before the first turn, and what else is set.
    """

    rounds: int
    steps: int
    rows: int
    ranks: int
    slot_batch: Mapping[str, int]
    k: int
    contenders: tuple[str, ...]
    turns: int
    turn_steps: int
    warm_steps: int
    sets: Mapping[str, Any]


FULL = Size(
    rounds=5,
    steps=240,
    rows=500_000,
    ranks=5,
    slot_batch={"dense-heavy": 1024, "embedding-heavy": 2048},
    k=4,
    contenders=(
        *PROTECTION,
        "torchrec-planner",
        "torchrec-planner-pipelined",
        "torchrec-planner-pipelined-bound",
        "torchrec-column_wise",
    ),
    turns=10,
    turn_steps=16,
    warm_steps=160,
    sets={},
)
SMOKE = Size(
    rounds=1,
    steps=8,
    rows=12_000,
    ranks=2,
    slot_batch={"embedding-heavy": 64},
    k=1,
    contenders=("none", "erasure", "torchrec-planner-pipelined-bound"),
    turns=2,
    turn_steps=16,
    warm_steps=16,
    sets={
        "model.max_rows_per_table": 1000,
        "model.dense_arch": "native",
    },
)


def counted_from(steps: int) -> int:
    """The first step that counts: a third of the steps do."""
    return 2 * steps // 3


def settings(regime: str, data: Path, steps: int, size: Size) -> dict[str, Any]:
    """The config of one regime, the kind of protection left out."""
    return {
        **measure.REGIMES[regime],
        "data.path": str(data),
        "train.steps": steps,
        "train.epochs": 0,
        "train.global_batch": size.ranks * size.slot_batch[regime],
        **TELLS_OFTEN,
        "data.eval_fraction": 0.01,
        "cluster.layout": "colocated",
        "cluster.servers": size.ranks,
        "cluster.trainers": size.ranks,
        "cluster.spares": 0,
        "protection.k": size.k,
        "protection.verify_parity_at_end": False,
        "storage.prefault": True,
        **size.sets,
    }


def ours(folder: Path, sets: dict[str, Any], name: str) -> dict[str, Any]:
    """One run of ECRM."""
    measure.run(folder, {**sets, **PROTECTION[name]})
    begin = counted_from(sets["train.steps"])
    finished = [time for step, time in read_run(folder).finished if step >= begin]
    seconds = statistics.median(after - before for before, after in pairwise(finished))
    return {
        "step_ms": 1e3 * seconds,
        "samples_per_second": sets["train.global_batch"] / seconds,
        "logloss": mean_loss(folder),
    }


def mean_loss(folder: Path) -> float:
    """The mean training loss of all steps of a run."""
    told, _ = parse_events((folder / "events.jsonl").read_text())
    progress = [event for event in told if event["event"] == "progress"]
    steps = sum(event["window"] for event in progress)
    return sum(event["logged"]["loss"] * event["window"] for event in progress) / steps


def interleaved(
    folder: Path, sets: dict[str, Any], names: Sequence[str], size: Size, step_ms: float
) -> dict[str, float]:
    """{name: samples per second over those of `none`}, of ECRM's contenders, interleaved."""
    seconds = max(0.5, size.turn_steps * step_ms / 1e3)
    found = run_interleaved(
        {name: {**sets, **PROTECTION[name]} for name in names},
        folder,
        size.warm_steps,
        size.turns,
        seconds,
    )
    return {name: 1 / (1 + Beside(steps, found["none"]).overhead) for name, steps in found.items()}


def profiled(folder: Path, sets: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The phases of a step of one of ECRM's contenders, of the steps that count."""
    measure.run(folder, {**sets, **PROTECTION[name], "train.profile": True})
    found = phases(folder / "trace.json", counted_from(sets["train.steps"]))
    return [
        {"phase": phase, **{what: round(ms, 3) for what, ms in times.items()}}
        for phase, times in found.items()
    ]


def peer(folder: Path, sets: dict[str, Any], name: str) -> dict[str, Any]:
    """One run of TorchRec."""
    folder.mkdir()
    result = folder / "result.json"
    options = ["--warm-up", str(counted_from(sets["train.steps"]))]
    done = subprocess.run(
        peer_words(name, sets, result, options),
        capture_output=True,
        text=True,
        timeout=measure.RUN_SECONDS,
        env={**os.environ, **ENVIRONMENT},
    )
    if done.returncode:
        sys.exit(f"the TorchRec peer failed:\n{done.stdout}{done.stderr}")
    told = json.loads(result.read_text())
    return {
        "step_ms": 1e3 * told["step_seconds"],
        "samples_per_second": told["samples_per_second"],
        "logloss": told["logloss"],
        "plan": told["plan"],
    }


def measured(name: str, folder: Path, sets: dict[str, Any]) -> dict[str, Any]:
    """One run of a contender; names of TorchRec's are those of `peer_words`."""
    return (peer if name.startswith("torchrec-") else ours)(folder, sets, name)


def main(words: Sequence[str] | None = None) -> None:
    """Run all contenders in rounds, write the CSV, print the ratios and their bars."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help=f"default {FULL.rounds}")
    parser.add_argument(
        "--steps", type=int, help=f"default {FULL.steps}; the first two thirds are not counted"
    )
    parser.add_argument(
        "--contender", choices=FULL.contenders, action="append", help="default: all"
    )
    parser.add_argument("--regime", choices=tuple(measure.REGIMES), action="append")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--data", type=Path, help="folder to keep the generated data in")
    parser.add_argument("--output", type=Path, help="the CSV; default: benchmarks/results/step.csv")
    arguments = parser.parse_args(words)
    size = SMOKE if arguments.smoke else FULL
    rounds, steps = arguments.rounds or size.rounds, arguments.steps or size.steps
    contenders = arguments.contender or size.contenders
    target = measure.target("step.csv", arguments.output, arguments.smoke)
    phases_target = target.with_name(f"{target.stem}_phases.csv")
    regimes = arguments.regime or list(size.slot_batch)
    if missing := [regime for regime in regimes if regime not in size.slot_batch]:
        parser.error(f"--smoke is {', '.join(size.slot_batch)} only, not {', '.join(missing)}")
    about = measure.device()
    try:
        rows, of_phases = (
            [row for row in tables.read_rows(path) or () if row["regime"] not in regimes]
            for path in (target, phases_target)
        )
    except tables.TableError as error:
        sys.exit(str(error))
    with tempfile.TemporaryDirectory() as scratch:
        for regime in regimes:
            data = measure.prepare(
                arguments.data or Path(scratch), size.rows, measure.REGIME_DATA[regime]
            )
            sets = settings(regime, data, steps, size)
            for number in range(rounds):
                for name in random.Random(number).sample(contenders, len(contenders)):
                    result = measured(name, Path(scratch) / f"{regime}-{number}-{name}", sets)
                    rows.append(
                        {
                            "regime": regime,
                            "round": number,
                            "contender": name,
                            "ranks": size.ranks,
                            "global_batch": sets["train.global_batch"],
                            "steps": steps,
                            "step_ms": round(result["step_ms"], 2),
                            "samples_per_second": round(result["samples_per_second"]),
                            "over_none_in_turns": "",
                            "train_logloss": round(result["logloss"], 6),
                            "plan": result.get("plan", ""),
                            **about,
                        }
                    )
                    print(
                        f"{regime:>15} round {number} {name:<18} "
                        f"{result['step_ms']:8.1f} ms a step",
                        flush=True,
                    )
                mine = {
                    row["contender"]: row
                    for row in rows
                    if (row["regime"], row["round"]) == (regime, number)
                    and row["contender"] in PROTECTION
                }
                if len(mine) > 1 and "none" in mine:
                    try:
                        beside = interleaved(
                            Path(scratch), sets, list(mine), size, mine["none"]["step_ms"]
                        )
                    except (RunFailed, ValueError) as error:
                        sys.exit(str(error))
                    for name, ratio in beside.items():
                        mine[name]["over_none_in_turns"] = round(ratio, 4)
                        print(
                            f"{regime:>15} round {number} {name:<18} "
                            f"{ratio:8.3f} of none's samples/s, interleaved",
                            flush=True,
                        )
                measure.write_csv(target, rows)
            for name in (name for name in PROFILED if name in contenders):
                found = profiled(Path(scratch) / f"{regime}-profiled-{name}", sets, name)
                of_phases += [
                    {"regime": regime, "contender": name, **line, **about} for line in found
                ]
                measure.write_csv(phases_target, of_phases)
    for regime, one, other, bar in STEP_BARS:
        if found := step_ratios(rows, regime, one, other):
            print(
                f"{regime:>15} {one} / {other}: {statistics.median(found):.3f} "
                f"({min(found):.3f} to {max(found):.3f}), bar {bar}"
            )
    print(f"written to {target}")


if __name__ == "__main__":
    main()

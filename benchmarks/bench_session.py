"""A session beside the recipe of a config, and beside TorchRec's DistributedModelParallel.

    python benchmarks/bench_session.py --rounds 1   # one round, about 12 minutes on 2 cores
    python benchmarks/bench_session.py              # 3 rounds
    python benchmarks/bench_session.py --smoke      # tiny, to a temporary file; what the tests run

All train one model, DLRM, with the same tables, slots, samples and initial values:
  session           benchmarks/session_dlrm.py under `ecrm launch`: TorchRec's own DLRM
  session-parts     the same, without the copy of all pooled rows that DLRM's SparseArch makes
  session-dot       the same with `ecrm.nn.DotInteraction` in the place of DLRM's InteractionArch
  trainer           the recipe by `ecrm launch CONFIG`, with ECRM's kernel for the interaction
  trainer-kernel    the same, beside session-dot: both have one kernel
  trainer-torchrec  the same with model.dense_arch=torchrec: the modules that session-parts trains
  torchrec-*        TorchRec DistributedModelParallel over gloo (benchmarks/peer_torchrec.py), with
                    and without its own pipelining; its slower plans are left to bench_step.py

Session and recipe have the same protection, erasure with m=1 and a commit every step. TorchRec has
none. Each has as many processes, which are server and trainer in one.

A session is interleaved with others (lib/interleaved.py): session-parts with the recipe,
session-dot with it, then session with TorchRec, with one id per bag, and then with 20. A sample's
bag of 20 has the ids of as many successive rows of the data. Samples per second are the global
batch over the mean step of a turn, and the median of the turns. Ratios are of neighbouring turns,
then their median.

The mean loss of the first 10 steps is in the CSV: it shows that all train the same. Memory is
treated alike, as in bench_step.py; three runs at once need 16 GB. Writes
benchmarks/results/session.csv. With --regime or --beside, it keeps what that file says of the
others.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ecrm.config.script import DECIDED_KEYS, DECIDED_SECTIONS
from ecrm.run.reading import parse_events
from lib import measure, tables
from lib.interleaved import (
    ENDLESS,
    TELLS_OFTEN,
    Program,
    RunFailed,
    built_in,
    interleave,
    launched,
    several_steps,
)
from lib.ratios import SESSION_BARS, session_ratios
from lib.told_steps import ToldSteps
from lib.torchrec_peer import ENVIRONMENT, peer_words

SCRIPT = Path(__file__).with_name("session_dlrm.py")
FIRST = TELLS_OFTEN["train.log_every_steps"]
"""Steps whose mean loss is written down."""

LEARNING_RATE = 0.05
"""Of rows that are alone in their bag: sums of 20 move as far with a twentieth of it."""

TRAINERS = ("trainer", "trainer-torchrec")
KERNEL = "trainer-kernel"
PEERS = ("torchrec-planner", "torchrec-planner-pipelined")


@dataclass(frozen=True)
class Case:
    """A session and what it is interleaved with at one time, on bags of so many ids.

    It has so many turns, of as many steps each.
    """

    session: str
    beside: str
    ids_per_bag: int
    others: tuple[str, ...]
    turns: int
    turn_steps: int


@dataclass(frozen=True)
class Size:
    """How much is run.

    Rounds, cases, generated rows, ranks, samples of a slot by (regime, ids per bag), k, steps
    before the first turn, and what else is set.
    """

    rounds: int
    cases: tuple[Case, ...]
    rows: int
    ranks: int
    slot_batch: Mapping[tuple[str, int], int]
    k: int
    warm_steps: int
    sets: Mapping[str, Any]

    @property
    def regimes(self) -> list[str]:
        return list(dict.fromkeys(regime for regime, _ in self.slot_batch))


FULL = Size(
    rounds=3,
    cases=(
        Case("session-parts", "trainer", 1, TRAINERS, turns=10, turn_steps=12),
        Case("session-dot", "kernel", 1, (KERNEL,), turns=10, turn_steps=12),
        Case("session", "torchrec", 1, PEERS, turns=5, turn_steps=8),
        Case("session", "torchrec", 20, PEERS, turns=5, turn_steps=6),
    ),
    rows=500_000,
    ranks=5,
    slot_batch={
        ("dense-heavy", 1): 1024,
        ("dense-heavy", 20): 512,
        ("embedding-heavy", 1): 2048,
        ("embedding-heavy", 20): 512,
    },
    k=4,
    warm_steps=10,
    sets={},
)
SMOKE = Size(
    rounds=1,
    cases=(
        Case("session-parts", "trainer", 1, ("trainer-torchrec",), turns=2, turn_steps=16),
        Case("session-dot", "kernel", 1, (KERNEL,), turns=2, turn_steps=16),
        Case("session", "torchrec", 20, ("torchrec-planner-pipelined",), turns=2, turn_steps=16),
    ),
    rows=12_000,
    ranks=2,
    slot_batch={("embedding-heavy", 1): 64, ("embedding-heavy", 20): 16},
    k=1,
    warm_steps=10,
    sets={
        "model.max_rows_per_table": 1000,
        "model.dense_arch": "native",
    },
)


def settings(regime: str, data: Path, ids_per_bag: int, size: Size) -> dict[str, Any]:
    """The config of all contenders."""
    return {
        **measure.REGIMES[regime],
        "data.path": str(data),
        "data.eval_fraction": 0.01,
        "train.epochs": 0,
        "train.sparse_lr": LEARNING_RATE / ids_per_bag,
        "train.global_batch": size.ranks * size.slot_batch[regime, ids_per_bag],
        "cluster.layout": "colocated",
        "cluster.servers": size.ranks,
        "cluster.trainers": size.ranks,
        "cluster.spares": 0,
        "protection.k": size.k,
        "protection.m": 1,
        "protection.verify_parity_at_end": False,
        "storage.prefault": True,
        **size.sets,
    }


def not_decided(sets: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that a script leaves to `ecrm launch`."""
    return {
        key: value
        for key, value in sets.items()
        if key not in DECIDED_KEYS and key.partition(".")[0] not in DECIDED_SECTIONS
    }


def program(name: str, folder: Path, sets: Mapping[str, Any], ids_per_bag: int) -> Program:
    """A contender, endless."""
    bags = ["--ids-per-bag", str(ids_per_bag)]
    if name.startswith("session"):
        bags += [f"--{name.removeprefix('session-')}"] if name != "session" else []
        own = ["quickstart", *measure.set_words({**sets, "train.steps": ENDLESS}), *bags]
        outer = measure.set_words({**not_decided(sets), **TELLS_OFTEN})
        return launched([str(SCRIPT), *outer], folder, own)
    if name in (*TRAINERS, KERNEL):
        arch = {"model.dense_arch": "torchrec"} if name == "trainer-torchrec" else {}
        return built_in(folder, {**sets, **arch})
    sets = {**sets, "train.steps": ENDLESS}
    words = peer_words(name, sets, folder / "result.json", [*bags, "--tell", str(folder)])
    return Program(words, ToldSteps(folder).finished, ENVIRONMENT)


def first_loss(name: str, folder: Path) -> float:
    """The mean loss of a contender's first steps, of all slots."""
    if name.startswith("torchrec-"):
        return ToldSteps(folder).first_loss(FIRST)
    events, _ = parse_events((folder / "events.jsonl").read_text())
    told = next(event for event in events if event["event"] == "progress")
    loss: float = told["logged"]["loss"]
    return loss


def measured(
    folder: Path, case: Case, sets: Mapping[str, Any], size: Size, order: random.Random
) -> list[dict[str, Any]]:
    """Rows of the CSV, one of each contender of a case, from one start of each."""
    names = order.sample((case.session, *case.others), 1 + len(case.others))
    seconds = interleave(
        {name: program(name, folder / name, sets, case.ids_per_bag) for name in names},
        size.warm_steps,
        case.turns,
        several_steps(case.turn_steps),
    )
    return [
        {
            "contender": name,
            "ranks": size.ranks,
            "global_batch": sets["train.global_batch"],
            "turns": len(mine),
            "step_ms": round(1e3 * statistics.median(mine), 2),
            "samples_per_second": round(sets["train.global_batch"] / statistics.median(mine)),
            "session_over_this": round(
                statistics.median(
                    this / session
                    for this, session in zip(mine, seconds[case.session], strict=True)
                ),
                4,
            ),
            "first_logloss": round(first_loss(name, folder / name), 6),
        }
        for name, mine in sorted(seconds.items(), key=lambda of: of[0] != case.session)
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Run all cases in rounds, write the CSV, print the ratios and their bars."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help=f"default {FULL.rounds}")
    parser.add_argument("--regime", choices=FULL.regimes, action="append", help="default: all")
    parser.add_argument("--beside", choices=("trainer", "kernel", "torchrec"), help="default: all")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--data", type=Path, help="folder to keep the generated data in")
    parser.add_argument("--output", type=Path, help="the CSV; default: results/session.csv")
    arguments = parser.parse_args(words)
    size = SMOKE if arguments.smoke else FULL
    target = measure.target("session.csv", arguments.output, arguments.smoke)
    regimes = arguments.regime or size.regimes
    if missing := [regime for regime in regimes if regime not in size.regimes]:
        parser.error(f"--smoke is {', '.join(size.regimes)} only, not {', '.join(missing)}")
    cases = [case for case in size.cases if arguments.beside in (None, case.beside)]
    kinds = {case.beside for case in cases}
    about = {**measure.device(), "torchrec": version("torchrec")}
    try:
        rows = [
            row
            for row in tables.read_rows(target) or ()
            if not (row["regime"] in regimes and row["beside"] in kinds)
        ]
    except tables.TableError as error:
        sys.exit(str(error))
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(arguments.rounds or size.rounds):
            order = random.Random(number)
            for regime in regimes:
                data = measure.prepare(
                    arguments.data or Path(scratch), size.rows, measure.REGIME_DATA[regime]
                )
                for case in cases:
                    place = {
                        "regime": regime,
                        "beside": case.beside,
                        "ids_per_bag": case.ids_per_bag,
                        "round": number,
                    }
                    folder = Path(scratch) / "-".join(map(str, place.values()))
                    sets = settings(regime, data, case.ids_per_bag, size)
                    try:
                        found = measured(folder, case, sets, size, order)
                    except (RunFailed, ValueError) as error:
                        sys.exit(str(error))
                    for row in found:
                        rows.append({**place, **row, **about})
                        print(
                            f"{regime:>15} bags of {case.ids_per_bag:>2} {row['contender']:<26} "
                            f"{row['step_ms']:8.1f} ms a step, session's samples/s / its: "
                            f"{row['session_over_this']:.3f}",
                            flush=True,
                        )
                    measure.write_csv(target, rows)
    for regime, ids_per_bag, other, bar in SESSION_BARS:
        if ratios := session_ratios(rows, regime, ids_per_bag, other):
            print(
                f"{regime:>15} bags of {ids_per_bag:>2} a session / {other}: "
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
                f"bar {bar}"
            )
    print(f"written to {target}")


if __name__ == "__main__":
    main()

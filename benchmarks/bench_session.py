"""A session beside TorchRec's DistributedModelParallel, and beside ECRM's former trainer.

    python benchmarks/bench_session.py --rounds 1   # one round, 15 minutes or more on 2 cores
    python benchmarks/bench_session.py              # 3 rounds
    python benchmarks/bench_session.py --former DIR # also a checkout of before, installed there
    python benchmarks/bench_session.py --smoke      # tiny, to a temporary file; what the tests run

All train one model, DLRM, with the same tables, slots, samples and initial values:
  session        benchmarks/session_dlrm.py under `ecrm launch`: TorchRec's own DLRM
  session-dot    the same with `ecrm.nn.DotInteraction` in the place of DLRM's InteractionArch
  torchrec-*     TorchRec DistributedModelParallel over gloo (benchmarks/peer_torchrec.py), with and
                 without its own pipelining; its slower plans are left to bench_step.py
  trainer-0.2.0  `ecrm launch CONFIG` of another checkout: up to version 0.2.0 a trainer without a
                 session, with ECRM's kernel for the interaction

Sessions and trainer have the same protection, erasure with m=1 and a commit every step. TorchRec
has none. Each has as many processes, which are server and trainer in one.

A session is interleaved with others (lib/interleaved.py): each with TorchRec, with one id per bag
and with 20, and session-dot with the trainer. A sample's bag of 20 has the ids of as many
successive rows of the data. Samples per second are the global batch over the mean step of a turn,
and the median of the turns. Ratios are of neighbouring turns: their median, and their percentiles
20 and 80.

The mean loss of the first 10 steps is in the CSV: it shows that all train the same. Memory is
treated alike, as in bench_step.py; three runs at once need 16 GB. Writes
benchmarks/results/session.csv. With --regime, --session or --former, it keeps what that file says
of the others.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    ratios_of,
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

FORMER = "trainer-0.2.0"
PEERS = ("torchrec-planner", "torchrec-planner-pipelined")


@dataclass(frozen=True)
class Case:
    """A session and what it is interleaved with at one time, on bags of so many ids.

    It has so many turns, of as many steps each.
    """

    session: str
    ids_per_bag: int
    others: tuple[str, ...]
    turns: int
    turn_steps: int

    @property
    def beside(self) -> str:
        return FORMER if FORMER in self.others else "torchrec"


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
        Case("session", 1, PEERS, turns=8, turn_steps=8),
        Case("session", 20, PEERS, turns=8, turn_steps=6),
        Case("session-dot", 1, PEERS, turns=8, turn_steps=8),
        Case("session-dot", 20, PEERS, turns=8, turn_steps=6),
        Case("session-dot", 1, (FORMER,), turns=10, turn_steps=12),
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
    warm_steps=60,
    sets={},
)
SMOKE = Size(
    rounds=1,
    cases=(
        Case("session", 20, ("torchrec-planner-pipelined",), turns=2, turn_steps=16),
        Case("session-dot", 1, ("torchrec-planner",), turns=2, turn_steps=16),
        Case("session-dot", 1, (FORMER,), turns=2, turn_steps=16),
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


def former(checkout: Path, folder: Path, sets: Mapping[str, Any]) -> Program:
    """The quickstart by `ecrm launch` of another checkout, in the environment in its .venv."""
    own = built_in(folder, sets)
    # there, not here: Python looks for modules in the working directory first
    there = ["env", "-C", str(checkout), str(checkout / ".venv" / "bin" / "python")]
    return replace(own, words=[*there, *own.words[1:]])


def program(
    name: str, folder: Path, sets: Mapping[str, Any], ids_per_bag: int, checkout: Path | None
) -> Program:
    """A contender, endless; `checkout` is where the former trainer is."""
    bags = ["--ids-per-bag", str(ids_per_bag)]
    if name.startswith("session"):
        bags += [f"--{name.removeprefix('session-')}"] if name != "session" else []
        own = ["quickstart", *measure.set_words({**sets, "train.steps": ENDLESS}), *bags]
        outer = measure.set_words({**not_decided(sets), **TELLS_OFTEN})
        return launched([str(SCRIPT), *outer], folder, own)
    if name == FORMER:
        assert checkout, "a case with the former trainer has its checkout"
        return former(checkout, folder, sets)
    sets = {**sets, "train.steps": ENDLESS}
    words = peer_words(name, sets, folder / "result.json", [*bags, "--tell", str(folder)])
    return Program(words, ToldSteps(folder).finished, ENVIRONMENT)


def first_loss(name: str, folder: Path) -> float:
    """The mean loss of a contender's first steps, of all slots."""
    if name.startswith("torchrec-"):
        return ToldSteps(folder).first_loss(FIRST)
    events, _ = parse_events((folder / "events.jsonl").read_text())
    told = next(event for event in events if event["event"] == "progress")
    loss: float = told["loss"] if name == FORMER else told["logged"]["loss"]
    return loss


def measured(
    folder: Path,
    case: Case,
    sets: Mapping[str, Any],
    size: Size,
    order: random.Random,
    checkout: Path | None,
) -> list[dict[str, Any]]:
    """Rows of the CSV, one of each contender of a case, from one start of each."""
    names = order.sample((case.session, *case.others), 1 + len(case.others))
    seconds = interleave(
        {name: program(name, folder / name, sets, case.ids_per_bag, checkout) for name in names},
        size.warm_steps,
        case.turns,
        several_steps(case.turn_steps),
    )
    rows = []
    for name, mine in sorted(seconds.items(), key=lambda of: of[0] != case.session):
        ratio, p20, p80 = ratios_of(mine, seconds[case.session])
        rows.append(
            {
                "contender": name,
                "ranks": size.ranks,
                "global_batch": sets["train.global_batch"],
                "turns": len(mine),
                "step_ms": round(1e3 * statistics.median(mine), 2),
                "samples_per_second": round(sets["train.global_batch"] / statistics.median(mine)),
                "session_over_this": round(ratio, 4),
                "session_over_this_p20": round(p20, 4),
                "session_over_this_p80": round(p80, 4),
                "first_logloss": round(first_loss(name, folder / name), 6),
            }
        )
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Run all cases in rounds, write the CSV, print the ratios and their bars."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help=f"default {FULL.rounds}")
    parser.add_argument("--regime", choices=FULL.regimes, action="append", help="default: all")
    parser.add_argument("--session", choices=("session", "session-dot"), help="default: both")
    parser.add_argument("--former", type=Path, help="another checkout, with a .venv: its trainer")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--data", type=Path, help="folder to keep the generated data in")
    parser.add_argument("--output", type=Path, help="the CSV; default: results/session.csv")
    arguments = parser.parse_args(words)
    size = SMOKE if arguments.smoke else FULL
    target = measure.target("session.csv", arguments.output, arguments.smoke)
    regimes = arguments.regime or size.regimes
    if missing := [regime for regime in regimes if regime not in size.regimes]:
        parser.error(f"--smoke is {', '.join(size.regimes)} only, not {', '.join(missing)}")
    cases = [
        case
        for case in size.cases
        if arguments.session in (None, case.session)
        and (FORMER not in case.others or arguments.former)
    ]
    checkout = arguments.former and arguments.former.resolve()
    replaced = {
        (regime, case.session, case.beside, str(case.ids_per_bag))
        for regime in regimes
        for case in cases
    }
    key = ("regime", "session", "beside", "ids_per_bag")
    about = {**measure.device(), "torchrec": version("torchrec")}
    try:
        rows = [
            row
            for row in tables.read_rows(target) or ()
            if tuple(row[name] for name in key) not in replaced
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
                        "session": case.session,
                        "beside": case.beside,
                        "ids_per_bag": case.ids_per_bag,
                        "round": number,
                    }
                    folder = Path(scratch) / "-".join(map(str, place.values()))
                    sets = settings(regime, data, case.ids_per_bag, size)
                    try:
                        found = measured(folder, case, sets, size, order, checkout)
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
    for regime, ids_per_bag, session, other, bar in SESSION_BARS:
        if ratios := session_ratios(rows, regime, ids_per_bag, session, other):
            lows, medians, highs = zip(*ratios, strict=True)
            print(
                f"{regime:>15} bags of {ids_per_bag:>2} {session} / {other}: "
                f"{statistics.median(medians):.3f} ({min(lows):.3f} to {max(highs):.3f}), bar {bar}"
            )
    print(f"written to {target}")


if __name__ == "__main__":
    main()

"""The dense part of a session's DLRM by torch.compile and in bfloat16, with and without kills.

    python benchmarks/bench_dense.py            # 8 minutes on 2 cores
    python benchmarks/bench_dense.py --smoke    # tiny, to a temporary file; what the tests run

The session is benchmarks/session_dlrm.py with the dense-heavy model of bench_session.py, one id
per bag, erasure with m=1. `session` has TorchRec's interaction, `session-dot` ECRM's. Each trains
in four manners:
  float32             as without options
  compiled            the dense parts by torch.compile
  bfloat16            the dense parts under torch.autocast
  compiled-bfloat16   both

The four are interleaved (lib/interleaved.py). Ratios are of neighbouring turns. After the turns
each manner trains a short run twice: undisturbed, and with a SIGKILL of a rank that is server and
trainer. A spare takes over the slot, and compiles then. Both runs must end with the same model.
The undisturbed run tells the CPU time of a slot's forward and backward pass, the median over the
ranks, and the mean loss of the first 10 steps. Writes benchmarks/results/dense.csv.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bench_session
from bench_session import SCRIPT, Case, first_loss, not_decided, program, settings

from ecrm.drill.drill_runs import read_run
from lib import measure, tables
from lib.interleaved import TELLS_OFTEN, RunFailed, interleave, ratios_of, several_steps

MANNERS = {
    "float32": (),
    "compiled": ("--compile",),
    "bfloat16": ("--bf16",),
    "compiled-bfloat16": ("--compile", "--bf16"),
}
CPU = re.compile(r"forward and backward of a slot: (\S+) ms of CPU")
"""What each rank with a slot prints at the end of a run."""


@dataclass(frozen=True)
class Size:
    """How much is run.

    Rounds, the sessions with their turns, steps of a short run, the step of the kill, and the rest
    as bench_session.py has it.
    """

    rounds: int
    regime: str
    cases: tuple[Case, ...]
    steps: int
    kill_step: int
    rest: bench_session.Size


FULL = Size(
    rounds=1,
    regime="dense-heavy",
    cases=(
        Case("session", 1, (), turns=8, turn_steps=8),
        Case("session-dot", 1, (), turns=8, turn_steps=8),
    ),
    steps=40,
    kill_step=20,
    rest=bench_session.FULL,
)
SMOKE = Size(
    rounds=1,
    regime="embedding-heavy",
    cases=(Case("session-dot", 1, (), turns=2, turn_steps=16),),
    steps=12,
    kill_step=4,
    rest=bench_session.SMOKE,
)


@dataclass(frozen=True)
class ShortRun:
    """SHA-256 of the model, CPU ms of a slot, ms between the steps around the kill, first loss."""

    model: str
    cpu_ms: float
    gap_ms: float | None
    loss: float


def short_run(
    folder: Path, case: Case, manner: str, sets: Mapping[str, Any], kills: Sequence[str]
) -> ShortRun:
    """A run of its own, to its end, with a spare."""
    outer = measure.set_words({**not_decided(sets), **TELLS_OFTEN, "cluster.spares": 1})
    own = ["--dot"] if case.session == "session-dot" else []
    words = ["launch", str(SCRIPT), *outer, "--run-dir", str(folder)]
    for kill in kills:
        words += ["--kill", kill]
    said = measure.ecrm(
        *words, "--", "quickstart", *measure.set_words(sets), *own, *MANNERS[manner]
    )
    summary = json.loads((folder / "summary.json").read_text())
    stalls = [failure.stall_seconds for failure in read_run(folder).failures]
    if len(stalls) != len(kills) or None in stalls:
        sys.exit(f"{case.session} {manner}: expected {len(kills)} gaps of deaths, found {stalls}")
    told = [float(each) for each in CPU.findall(said)]
    if len(told) != sets["cluster.trainers"]:
        sys.exit(f"{case.session} {manner}: {len(told)} ranks have a slot: the spare has none")
    return ShortRun(
        summary["model_sha256"],
        statistics.median(told),
        1e3 * stalls[0] if stalls else None,
        first_loss(case.session, folder),
    )


def measured(folder: Path, case: Case, data: Path, size: Size) -> list[dict[str, Any]]:
    """Rows of the CSV, one of each manner, from one start of each."""
    sets = settings(size.regime, data, case.ids_per_bag, size.rest)
    programs = {}
    for manner, own in MANNERS.items():
        plain = program(case.session, folder / manner, sets, case.ids_per_bag, None)
        programs[manner] = replace(plain, words=[*plain.words, *own])
    seconds = interleave(programs, size.rest.warm_steps, case.turns, several_steps(case.turn_steps))
    rows = []
    for manner, mine in seconds.items():
        ratio, p20, p80 = ratios_of(seconds["float32"], mine)
        short = {**sets, "train.steps": size.steps}
        calm, killed = (
            short_run(folder / f"{manner}-{len(kills)}", case, manner, short, kills)
            for kills in ([], [f"1@{size.kill_step}"])
        )
        if killed.model != calm.model:
            sys.exit(f"{case.session} {manner}: a kill changed {calm.model} to {killed.model}")
        rows.append(
            {
                "manner": manner,
                "ranks": size.rest.ranks,
                "global_batch": sets["train.global_batch"],
                "turns": len(mine),
                "step_ms": round(1e3 * statistics.median(mine), 2),
                "over_float32": round(ratio, 4),
                "over_float32_p20": round(p20, 4),
                "over_float32_p80": round(p80, 4),
                "cpu_ms": round(calm.cpu_ms, 2),
                "logloss": round(calm.loss, 6),
                "gap_ms": round(killed.gap_ms, 1),
                "model_sha256": killed.model,
                "undisturbed_sha256": calm.model,
            }
        )
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Run both sessions in rounds, write the CSV, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help=f"default {FULL.rounds}")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--data", type=Path, help="folder to keep the generated data in")
    parser.add_argument("--output", type=Path, help="the CSV; default: results/dense.csv")
    arguments = parser.parse_args(words)
    size = SMOKE if arguments.smoke else FULL
    target = measure.target("dense.csv", arguments.output, arguments.smoke)
    about, rows = measure.device(), []
    with tempfile.TemporaryDirectory() as scratch:
        kind = measure.REGIME_DATA[size.regime]
        data = measure.prepare(arguments.data or Path(scratch), size.rest.rows, kind)
        for number in range(arguments.rounds or size.rounds):
            for case in size.cases:
                folder = Path(scratch) / f"{case.session}-{number}"
                try:
                    found = measured(folder, case, data, size)
                except (RunFailed, ValueError) as error:
                    sys.exit(str(error))
                place = {"regime": size.regime, "session": case.session, "round": number}
                rows += [{**place, **row, **about} for row in found]
                measure.write_csv(target, rows)
    print("\n".join(tables.dense(rows)))
    print(f"written to {target}")


if __name__ == "__main__":
    main()

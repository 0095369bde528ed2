"""Faults that a user asks for: the texts of --kill, testing.flip and testing.gpu_fault.

`ecrm.testing.faults` carries the faults out. Nothing heavy is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ecrm.base.errors import UsageError

PHASES = (
    "input",
    "lookup",
    "repair",
    "forward",
    "backward",
    "update",
    "parity",
    "dense",
    "scrub",
    "commit",
    "recover",
    "reshape",
    "rollback",
    "checkpoint",
    "manifest",
    "evaluate",
    "finish",
)

FLIP_KINDS = ("row", "state", "parity")
GPU_FAULT_KINDS = ("memory", "lost", "hang")

KILLED_FROM_OUTSIDE = "ECRM_KILLED_FROM_OUTSIDE"
"""Environment variable for making ranks wait for scheduled kills.

`ecrm drill` sets the variable, and kills the ranks.
"""


@dataclass(frozen=True)
class Kill:
    """`rank` dies when `phase` begins at `step`, or at the first later step with the phase.

    With a commit interval not every step has `parity`, `scrub` and `commit`; `repair`, `recover`,
    `reshape` and `rollback` begin only while work of the kind is left, `scrub` only with
    protection.scrub_rows_per_step and nothing rebuilding; `checkpoint` as a checkpoint begins,
    `manifest` on all ranks just before the checkpoint counts.
    """

    rank: int
    step: int
    phase: str = "input"

    def __str__(self) -> str:
        return f"{self.rank}@{self.step}:{self.phase}"


def parse_kill(text: str) -> Kill:
    """Parse RANK@STEP[:PHASE]; raises UsageError for a text of a different form."""
    match = re.fullmatch(r"([0-9]{1,18})@([0-9]{1,18})(?::(\w+))?", text)
    if not match:
        raise UsageError(
            f"--kill {text[:100]}: type RANK@STEP or RANK@STEP:PHASE, such as 1@20:parity"
        )
    phase = match[3] or "input"
    if phase not in PHASES:
        raise UsageError(f"--kill {text}: no phase {phase!r}; phases are {', '.join(PHASES)}")
    return Kill(int(match[1]), int(match[2]), phase)


def check_kills(kills: Sequence[Kill], world_size: int, steps: int) -> None:
    """Raise UsageError for a kill with a rank or step outside the run."""
    check_ranks(kills, world_size)
    for kill in kills:
        last = (
            steps
            if kill.phase in ("scrub", "evaluate", "finish", "repair", "recover", "reshape")
            else steps - 1
        )
        if kill.step > last:
            raise UsageError(f"--kill {kill}: there is no step {kill.step}, the last is {last}")


def unfired(kills: Sequence[Kill], died_in: Mapping[int, int]) -> dict[Kill, str]:
    """The scheduled kills not carried out, with reasons; `died_in` is the step of death by rank."""
    found = {}
    for kill in kills:
        if kill.rank not in died_in:
            found[kill] = f"that phase did not begin on rank {kill.rank} from that step on"
        elif died_in[kill.rank] + 1 < kill.step:  # a death may be noticed in the step before
            found[kill] = f"rank {kill.rank} had died in step {died_in[kill.rank]}"
    return found


def check_ranks(kills: Sequence[Kill], world_size: int) -> None:
    """Raise UsageError for a kill with a rank outside the run."""
    for kill in kills:
        if kill.rank >= world_size:
            raise UsageError(
                f"--kill {kill}: there is no rank {kill.rank}, ranks are 0 to {world_size - 1}"
            )


@dataclass(frozen=True)
class Flip:
    """A bit flip on `rank` in `step`, after the updates of the step.

    `kind` is the place of the bit: a data row, its optimizer state, or a parity row.
    """

    rank: int
    step: int
    kind: str


def parse_flip(text: str) -> Flip | None:
    """Parse RANK@STEP:KIND; return `None` for a text of a different form."""
    match = re.fullmatch(rf"([0-9]{{1,18}})@([0-9]{{1,18}}):({'|'.join(FLIP_KINDS)})", text)
    return Flip(int(match[1]), int(match[2]), match[3]) if match else None


@dataclass(frozen=True)
class GpuFault:
    """A failure of the GPU of `rank` when `phase` begins at `step`, or first begins after `step`.

    `kind`: the GPU has no memory left, is lost, or hangs in every operation.
    """

    rank: int
    step: int
    phase: str
    kind: str


def parse_gpu_fault(text: str) -> GpuFault | None:
    """Parse RANK@STEP:PHASE:KIND; return `None` for a text of a different form."""
    match = re.fullmatch(
        rf"([0-9]{{1,18}})@([0-9]{{1,18}}):({'|'.join(PHASES)}):({'|'.join(GPU_FAULT_KINDS)})", text
    )
    return GpuFault(int(match[1]), int(match[2]), match[3], match[4]) if match else None

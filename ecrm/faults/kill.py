"""Scheduled kills: in a phase of a step a rank kills itself, or waits for SIGKILL from a drill."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ecrm.errors import UsageError

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

KILLED_FROM_OUTSIDE = "ECRM_KILLED_FROM_OUTSIDE"
"""Environment variable for making ranks wait for scheduled kills.

`ecrm drill` sets the variable, and kills the ranks.
"""

KILL_DUE = "kill_due"
"""The event of a rank waiting to be killed."""

WAIT_SECONDS = 20.0
"""Longest wait of a rank for a kill. Then the rank goes on, and the kill has not happened."""


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


class KillSwitch:
    """Ends this rank at its scheduled kills; every kill happens once.

    `before(kill, step)` is called just before SIGKILL. If `environ` has KILLED_FROM_OUTSIDE,
    `write` gets the event of the due kill instead, and the rank waits in the phase, at most
    WAIT_SECONDS, until killed.
    """

    def __init__(
        self,
        kills: Sequence[Kill],
        rank: int,
        before: Callable[[Kill, int], None],
        write: Callable[[dict[str, Any]], None],
        environ: Mapping[str, str] = os.environ,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._mine = {kill for kill in kills if kill.rank == rank}
        self._before, self._write, self._wait = before, write, wait
        self._from_outside = KILLED_FROM_OUTSIDE in environ

    def __call__(self, step: int, phase: str) -> None:
        for kill in [kill for kill in self._mine if step >= kill.step and phase == kill.phase]:
            self._mine.remove(kill)
            if self._from_outside:
                self._write(
                    {
                        "event": KILL_DUE,
                        "rank": kill.rank,
                        "step": step,
                        "phase": phase,
                        "scheduled": str(kill),
                    }
                )
                self._wait(WAIT_SECONDS)
            else:
                self._before(kill, step)
                os.kill(os.getpid(), signal.SIGKILL)

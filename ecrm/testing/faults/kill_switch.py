"""Scheduled kills: in a phase of a step a rank kills itself, or waits for SIGKILL from a drill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from ecrm.config.faults import KILLED_FROM_OUTSIDE, Kill
from ecrm.engine import events

WAIT_SECONDS = 20.0
"""Longest wait of a rank for a kill. Then the rank goes on, and the kill has not happened."""


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
        write: Callable[[events.Event], None],
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
                    events.KillDue(rank=kill.rank, step=step, phase=phase, scheduled=str(kill))
                )
                self._wait(WAIT_SECONDS)
            else:
                self._before(kill, step)
                os.kill(os.getpid(), signal.SIGKILL)

"""Progress: regular reports of a run every so many steps, and the times of steps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ecrm.engine.engine import Engine
from ecrm.run.reporter import KEPT_COMMITS

MOST_FINISHED = 1000
"""Most steps between progress steps, however rarely a line is printed.

The bound limits the memory kept by a rank, and the history lost by a rank's death.
"""

Told = tuple[dict[str, Any], str]
"""The fields of a progress event, and the event's line, empty for no line."""

Tell = Callable[[int, Callable[[], Told]], None]
"""See `Progress`."""


Measured = Callable[[], dict[str, Any]]
"""Returns the measured values, called when the event is told."""


def window_start(step: int, every: int) -> int:
    """The last progress step before `step`, or 0.

    Progress steps are multiples of `every` (0: none) and, counted from each multiple, multiples of
    MOST_FINISHED steps.
    """
    before = step - 1
    line = before - before % every if every else 0
    return line + (before - line) // MOST_FINISHED * MOST_FINISHED


class StepProgress(ABC):
    """Keeps step times on every rank; calls `tell(step, make)` at progress steps and the last step.

    `make()`, on a holder of the dense replica, returns the fields and the line. A line comes every
    `every` steps (0: only at the end), an event without a line every `MOST_FINISHED` steps.
    Subclasses decide on the measured values besides times.
    """

    def __init__(self, steps: int, every: int, tell: Tell) -> None:
        self._steps, self._every, self._tell = steps, every, tell
        self.step_seconds: list[float] = []
        self._reported = self._forgotten = 0
        # for events another rank may have to tell: commits at the event, first step needed
        self._told: list[tuple[int, int]] = []
        self._last = self._window_start = time.monotonic()
        self._finished_at: list[tuple[int, float]] = []

    def restart_clock(self) -> None:
        """Exclude the time since the last step from the times of steps (start, evaluation)."""
        now = time.monotonic()
        self._window_start += now - self._last
        self._last = now

    def begins_at(self, engine: Engine) -> None:
        """Begin with the engine's next step: not 0 in a run continued from a checkpoint."""
        self._reported = engine.step

    def on_recovery(self, engine: Engine) -> None:
        """Prepare to report undone steps again, after being finished once more.

        Also report the last step, if this rank has only now learned of the step's end.
        """
        self._reported = min(self._reported, engine.step)
        self._forgotten = 0
        self._report_if_due(engine)

    def step_finished(self, engine: Engine) -> None:
        """Count a finished step; print and write when due."""
        now = time.monotonic()
        self.step_seconds.append(now - self._last)
        self._last = now
        self._finished_at.append((engine.step, time.time()))
        self._report_if_due(engine)
        self._forget(engine)

    def _is_due(self, step: int) -> bool:
        return step == self._steps or window_start(step + 1, self._every) == step

    def _report_if_due(self, engine: Engine) -> None:
        step = engine.step
        if step <= self._reported or not self._is_due(step):
            return
        first = window_start(step, self._every)
        seconds = max(self._last - self._window_start, 1e-9)
        fields = {
            "step": step,
            "committed": engine.committed,
            **self.counted(step, len(self._finished_at) / seconds),
            "failures_left": engine.state.failures_left,
            "rebuilt": engine.state.rebuild_fraction,
            "finished": self._finished_at,
        }
        self._told.append((engine.state.commits, first))
        self._tell(step, partial(self._made, first, fields, self.measured(engine, first)))
        self._reported, self._window_start, self._finished_at = step, self._last, []

    def _made(self, first: int, fields: dict[str, Any], measured: Measured) -> Told:
        step = fields["step"]
        fields = {**fields, **measured()}
        line = step == self._steps or (self._every and step % self._every == 0)
        return fields, self.in_words(fields, step - first) if line else ""

    @abstractmethod
    def counted(self, step: int, steps_per_second: float) -> dict[str, Any]:
        """The fields known to every rank about `step` steps and the pace."""

    @abstractmethod
    def measured(self, engine: Engine, first: int) -> Measured:
        """The measurements of a dense holder for the steps from `first` up to the engine's.

        The returned function may be called commits later.
        """

    @abstractmethod
    def in_words(self, fields: dict[str, Any], window: int) -> str:
        """The line of a progress step, `window` steps after the last line."""

    def _forget(self, engine: Engine) -> None:
        """Have the engine forget notes of steps never to be told, or told again, later."""
        self._told = [
            (at, first) for at, first in self._told if at >= engine.state.commits - KEPT_COMMITS
        ]
        needed = min(
            [first for _, first in self._told] + [window_start(engine.committed + 1, self._every)]
        )
        if needed > self._forgotten:
            self._forgotten = needed
            engine.state.log.forget(needed)

    def quantiles(self) -> dict[str, float | None]:
        """Median, 99th percentile and maximum of the seconds of a step on this rank."""
        if not self.step_seconds:
            return {"p50": None, "p99": None, "max": None}
        seconds = np.array(self.step_seconds)
        return {
            "p50": float(np.quantile(seconds, 0.5)),
            "p99": float(np.quantile(seconds, 0.99)),
            "max": float(seconds.max()),
        }

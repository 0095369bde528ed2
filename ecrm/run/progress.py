"""Progress: regular reports of a run every so many steps, and the times of steps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ecrm.engine.engine import Engine
from ecrm.engine.events import Progress
from ecrm.run.reporter import KEPT_COMMITS, Make

MOST_FINISHED = 1000
"""Most steps between progress steps, however rarely a line is printed.

The bound limits the memory kept by a rank, and the history lost by a rank's death.
"""

Tell = Callable[[int, Make], bool]
"""See `StepProgress`."""


@dataclass(frozen=True)
class Measured:
    """Measurements of a dense holder; see the fields of `ecrm.engine.events.Progress`."""

    skipped: int
    logged: Mapping[str, float]
    window: int


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

    `make()`, on a holder of the dense replica, returns the event and the line. A line comes every
    `every` steps (0: only at the end), an event without a line every `MOST_FINISHED` steps. `tell`
    returns False for a step told before, and undone since: the next event has the times, too.
    `open_end`: whether the data may end before the last step. `samples`: the number of samples in a
    step, 0 if unknown. Subclasses decide on the measured values besides times.
    """

    def __init__(
        self, steps: int, every: int, tell: Tell, open_end: bool = False, samples: int = 0
    ) -> None:
        self._steps, self._every, self._tell = steps, every, tell
        self._open_end, self._samples = open_end, samples
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
        pace = len(self._finished_at) / seconds
        progress = Progress(
            step=step,
            committed=engine.committed,
            steps_per_second=pace,
            samples=step * self._samples or None,
            samples_per_second=pace * self._samples or None,
            failures_left=engine.state.failures_left,
            rebuilt=engine.state.rebuild_fraction,
            finished=self._finished_at,
            window=0,
        )
        self._told.append((engine.state.commits, first))
        self._reported = step
        if self._tell(step, partial(self._made, first, progress, self.measured(engine, first))):
            self._window_start, self._finished_at = self._last, []

    def _made(
        self, first: int, progress: Progress, measured: Callable[[], Measured]
    ) -> tuple[Progress, str]:
        step, found = progress.step, measured()
        progress = replace(
            progress, skipped=found.skipped, logged=found.logged, window=found.window
        )
        if step != self._steps and not (self._every and step % self._every == 0):
            return progress, ""
        return progress, progress.in_words(self._steps, self._open_end, step - first)

    @abstractmethod
    def measured(self, engine: Engine, first: int) -> Callable[[], Measured]:
        """The measurements of a dense holder for the steps from `first` up to the engine's.

        The returned function may be called commits later.
        """

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

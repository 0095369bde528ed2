"""One rank's part in a run: the work between steps, and the end of the run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from ecrm.checkpoint.keeper import Checkpoints
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import StopRequested
from ecrm.run.agreed_stop import agree_on_stop
from ecrm.run.ending import Ending, Record
from ecrm.run.finite import FiniteWatch
from ecrm.run.progress import StepProgress


class RunStopped(SystemExit):
    """Raised when the run has ended because a rank was asked to stop, and all ranks know."""


class RankRun:
    """The work of all live ranks together before, between and after the steps of a run.

    Every live rank calls the same methods in the same order. After StepAborted from a method, or
    from the engine, `on_recovery` comes first.

    - `asked()`: the signal asking this rank to stop, `None` before.
    - `told(summary, why_not_kept)`: called once the run is over. `summary` is the summary on the
      reporter, `None` elsewhere and in a stopped run; `why_not_kept` is the reason for not keeping
      the model.
    """

    def __init__(
        self,
        engine: Engine,
        steps: int,
        record: Record,
        ending: Ending,
        progress: StepProgress,
        checkpoints: Checkpoints | None,
        watch: FiniteWatch,
        asked: Callable[[], signal.Signals | None],
        told: Callable[[dict[str, Any] | None, str], None] = lambda summary, why_not_kept: None,
    ) -> None:
        self.engine = engine
        self._steps, self._record, self._ending = steps, record, ending
        self._progress, self._checkpoints, self._watch = progress, checkpoints, watch
        self._asked, self._told = asked, told
        self.furthest = engine.step
        """The most steps finished by this rank."""

    @property
    def steps_left(self) -> int:
        """The number of steps not trained yet."""
        return 0 if self.engine.over else self._steps - self.engine.step

    def between_steps(self) -> None:
        """Collective, before a step: go on with a checkpoint, or begin a checkpoint if due."""
        if self._checkpoints is not None:
            self._checkpoints.between_steps()

    def troubles_to_report(self, step: int, troubles: dict[int, str]) -> dict[int, str]:
        """The part of `troubles`, found by slots in a step, to report to every rank."""
        return self._watch.troubles_to_report(step, troubles)

    def restart_clock(self) -> None:
        """Exclude the time since the last step, spent on an evaluation, from the times of steps."""
        self._progress.restart_clock()

    def step_finished(self) -> None:
        """Count a step finished on this rank, and report when a report is due."""
        if self._record.profile is not None:
            self._record.profile.step_finished()
        self._progress.step_finished(self.engine)
        self.furthest = max(self.furthest, self.engine.step)
        if self.engine.step == self._steps or self.engine.over:
            self._ending.trained()

    def on_recovery(self) -> None:
        """Take note of a finished recovery: steps may have been undone."""
        self._progress.on_recovery(self.engine)
        if self._checkpoints is not None:
            self._checkpoints.on_recovery()
        self._ending.on_recovery()

    def keep_best(self) -> None:
        """Collective, at a commit: write a checkpoint of this step, as `best`."""
        assert self._checkpoints is not None, "checked at the start"
        self._checkpoints.keep_best()

    def keep(self) -> None:
        """Collective, after the last step: keep the model, safe from any later failure.

        With a protection made only of checkpoints or files, no rank can train on afterwards. A
        model whose parity is still to be verified is kept by `finish`: wrong rows are not kept.
        """
        self.engine.commit()
        if self._checkpoints is not None and not self._ending.verifies:
            self._checkpoints.finish()

    def finish(self) -> None:
        """Collective, after the last step: verify and keep the model, write the summary.

        Raises StepAborted after a failure, StopRequested if a rank asks to stop, ParityMismatch on
        every rank, and all errors of `told`.
        """
        self._told(self._ending.finish(), self._ending.why_not_kept)

    def stop(self) -> None:
        """Collective, at a commit, after StopRequested: end the run, for a rank has asked to stop.

        Raises RunStopped once the run is over, and all errors of `told`. Returns if no signal was
        the reason: a rank unable to write has left. Raises StepAborted after a failure.
        """
        while True:
            number = agree_on_stop(self.engine, self._asked(), self._record.folder)
            if number is None:
                return
            try:
                self._ending.stop(number)
                break
            except StopRequested:  # stopped.json or the checkpoint may not fit on the disk
                continue
        self._told(None, self._ending.why_not_kept)
        raise RunStopped(0)

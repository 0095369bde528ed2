"""One rank's part in a run: what is due between its steps, and how it ends."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from ecrm.checkpoint.keeper import Checkpoints
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import StopAgreed
from ecrm.process.agreed_stop import agree_on_stop
from ecrm.rank.ending import Ending, Record
from ecrm.rank.finite import FiniteWatch
from ecrm.rank.progress import StepProgress


class RunStopped(SystemExit):
    """The run has ended since a rank was asked to stop, and all ranks know."""


class RankRun:
    """What every live rank does together before, between and after the steps of a run.

    Every live rank calls the same methods in the same order. After StepAborted from any of them,
    and from the engine, `went_back` comes first.

    - `asked()`: the signal that asks this rank to stop, None before.
    - `told(summary, unkept)`: called once the run is over. The summary is that of the reporter,
      None elsewhere and where the run was stopped; `unkept` is why its model is not kept.
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
        told: Callable[[dict[str, Any] | None, str], None] = lambda summary, unkept: None,
    ) -> None:
        self.engine = engine
        self._steps, self._record, self._ending = steps, record, ending
        self._progress, self._checkpoints, self._watch = progress, checkpoints, watch
        self._asked, self._told = asked, told
        self.furthest = engine.step
        """The most steps that this rank has finished."""

    @property
    def steps_left(self) -> int:
        """How many steps are not trained yet."""
        return 0 if self.engine.over else self._steps - self.engine.step

    def between_steps(self) -> None:
        """Collective, before a step: go on with a checkpoint, or begin one if it is due."""
        if self._checkpoints is not None:
            self._checkpoints.between_steps()

    def worth_saying(self, step: int, troubles: dict[int, str]) -> dict[int, str]:
        """The part of what slots have in trouble in a step that all ranks must know."""
        return self._watch.worth_saying(step, troubles)

    def restart_clock(self) -> None:
        """The time since the last step belongs to no step, but to an evaluation."""
        self._progress.restart_clock()

    def step_finished(self) -> None:
        """A step is done on this rank: count it, and tell of it when that is due."""
        if self._record.profile is not None:
            self._record.profile.step_finished()
        self._progress.step_finished(self.engine)
        self.furthest = max(self.furthest, self.engine.step)
        if self.engine.step == self._steps or self.engine.over:
            self._ending.trained()

    def went_back(self) -> None:
        """A recovery is through: steps may have been undone."""
        self._progress.went_back(self.engine)
        if self._checkpoints is not None:
            self._checkpoints.went_back()
        self._ending.went_back()

    def keep_best(self) -> None:
        """Collective, at a commit: write a checkpoint of this step, as `best`."""
        assert self._checkpoints is not None, "checked at the start"
        self._checkpoints.keep_best()

    def keep(self) -> None:
        """Collective, after the last step: keep the model, so that a failure undoes no step more.

        Where checkpoints or files are all that a protection has, nobody can train on after it.
        """
        self.engine.commit()
        if self._checkpoints is not None:
            self._checkpoints.finish()

    def finish(self) -> None:
        """Collective, after the last step: verify and keep the model, write the summary.

        Raises StepAborted after a failure, StopAgreed where a rank asks to stop, ParityMismatch on
        every rank, and what `told` raises.
        """
        self._told(self._ending.finish(), self._ending.unkept)

    def stop(self) -> None:
        """Collective, at a commit, after StopAgreed: end the run, since a rank has asked for it.

        Raises RunStopped once it is over, and what `told` raises. Returns where no signal was the
        reason: a rank that could not write has left. Raises StepAborted after a failure.
        """
        while True:
            number = agree_on_stop(self.engine, self._asked(), self._record.folder)
            if number is None:
                return
            try:
                self._ending.stop(number)
                break
            except StopAgreed:  # what it writes may not fit
                continue
        self._told(None, self._ending.unkept)
        raise RunStopped(0)

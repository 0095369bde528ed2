"""The training of the built-in model on one rank: the work on the slots of a run's loop."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ecrm.checkpoint.keeper import Checkpoints
from ecrm.config.schema import Config
from ecrm.data.dataset import CriteoDataset
from ecrm.engine.engine import Engine
from ecrm.model.slot_batch import SlotBatch, SlotForward, backward, forward
from ecrm.run.ending import Ending, Record
from ecrm.run.finite import FiniteWatch
from ecrm.run.progress import Tell
from ecrm.run.rank_run import RankRun, RunStopped
from ecrm.run.step_loop import SlotResult, SlotStep, StepLoop
from ecrm.train.bad_data import Readings
from ecrm.train.build_engine import dense_of
from ecrm.train.evaluator import Evaluator
from ecrm.train.finite import origin
from ecrm.train.history import History
from ecrm.train.last_words import LastWords
from ecrm.train.progress import Progress


class CriteoBatches:
    """The batches of a dataset, from step `data_began` on, for the slots of an engine."""

    reusable = True

    def __init__(
        self, engine: Engine, dataset: CriteoDataset, global_batch: int, data_began: int
    ) -> None:
        self._engine, self._dataset = engine, dataset
        self._global_batch, self._began = global_batch, data_began
        self._offsets = torch.tensor(engine.state.spaces[0].offsets)

    def batch(self, step: int, slot: int) -> SlotBatch:
        """The batch of a slot in a step. Raises DataError for unreadable data."""
        dense, ids, labels = self._dataset.batch_for(
            step - self._began, slot, len(self._engine.view.slots), self._global_batch
        )
        return SlotBatch.of(dense, ids, labels, self._offsets)

    def rows(self, batch: SlotBatch) -> Sequence[Tensor]:
        """The unique rows used by the batch, int64 [U], of the one row space."""
        return [batch.rows]

    def went_back(self) -> bool:
        """Earlier batches are still good."""
        return True


class Trainer:
    """Drives an engine over a dataset; every live rank has a Trainer and calls the same methods.

    `tell` gets the rank's `Progress`, `event(fields)` gets the events; `asked()` is the signal
    asking the rank to stop, `None` before. `told(summary, unkept)` is called once the run is over.
    """

    def __init__(
        self,
        engine: Engine,
        dataset: CriteoDataset,
        config: Config,
        steps: int,
        record: Record,
        tell: Tell = lambda step, make: None,
        asked: Callable[[], signal.Signals | None] = lambda: None,
        checkpoints: Checkpoints | None = None,
        watch: FiniteWatch | None = None,
        data_began: int = 0,
        history: History | None = None,
        event: Callable[[dict[str, Any]], None] = lambda fields: None,
        told: Callable[[dict[str, Any] | None, str], None] = lambda summary, unkept: None,
    ) -> None:
        self._engine, self._told = engine, told
        self.stopped = False
        """Whether the run has ended on a request to stop."""
        self._global_batch = config.train.global_batch
        watch = watch or FiniteWatch(stop=True, window=1, tell=lambda fields: None)
        self._progress = Progress(steps, self._global_batch, config.train.log_every_steps, tell)
        self._progress.begins_at(engine)
        evaluator = Evaluator(
            engine,
            dataset,
            config,
            steps,
            history or History(),
            watch,
            checkpoints,
            self._progress,
            event,
        )
        words = LastWords(engine, evaluator, self._global_batch)
        ending = Ending(engine, config, steps, record, checkpoints, self._progress, words)
        self._summary: dict[str, Any] | None = None
        run = RankRun(
            engine,
            steps,
            record,
            ending,
            self._progress,
            checkpoints,
            watch,
            asked,
            self._tell_end,
        )
        batches = CriteoBatches(engine, dataset, self._global_batch, data_began)
        self._loop = StepLoop(
            run, batches, steps, evaluator, run.finish, doubts=Readings(engine, dataset)
        )

    def run(self) -> dict[str, Any] | None:
        """Train to the end, whatever dies; returns the summary on the reporter, `None` elsewhere.

        Returns `None` on every rank after a request to stop. Raises Unrecoverable on every rank if
        too much is lost, NotFinite for a nonfinite loss, DataError as `Readings.compare` does,
        EcrmError if no rank can write the run folder, and the errors of `told`.
        """
        self._progress.restart_clock()
        try:
            for parts in self._loop:
                self._compute(parts)
        except RunStopped:
            self.stopped = True
        return self._summary

    def _tell_end(self, summary: dict[str, Any] | None, unkept: str) -> None:
        self._summary = summary
        self._told(summary, unkept)

    def _compute(self, parts: Sequence[SlotStep[SlotBatch]]) -> None:
        """Run the forward of all slots, then the backward."""
        engine = self._engine
        forwards = []
        for part in parts:
            (looked_up,) = part.values
            sums = engine.gradient_buffer(part.slot, 0, len(looked_up))
            forwards.append(
                forward(dense_of(engine), part.batch, looked_up, self._global_batch, sums)
            )
        engine.enter("backward")
        for part, between in zip(parts, forwards, strict=True):
            part.result = self._result(part, between)

    def _result(self, part: SlotStep[SlotBatch], between: SlotForward) -> SlotResult:
        dense = dense_of(self._engine)
        gradients, contribution = backward(dense, between)
        loss = contribution[-1:]
        trouble = ""
        if not math.isfinite(float(loss)):
            space = self._engine.state.spaces[0]
            trouble = origin(dense.module, between.batch, between.values, space)
        note = self._progress.note(part.step, loss, between.logits, part.batch.labels)
        return SlotResult([gradients], contribution, note, trouble)

"""The training loop of one rank: batches in, engine steps, evaluations, until the run ends."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ecrm.checkpoint.keeper import Checkpoints
from ecrm.config.schema import Config
from ecrm.data.dataset import CriteoDataset
from ecrm.engine.computed import Computed
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import StepAborted, StopAgreed
from ecrm.errors import DataError
from ecrm.model.slot_batch import SlotBatch, SlotResult, backward, forward
from ecrm.process.agreed_stop import agree_on_stop
from ecrm.rank.ending import Ending, Record
from ecrm.rank.finite import FiniteWatch
from ecrm.rank.progress import Tell
from ecrm.train.bad_data import Readings
from ecrm.train.build_engine import dense_of
from ecrm.train.evaluator import Evaluator
from ecrm.train.finite import origin
from ecrm.train.history import History
from ecrm.train.last_words import LastWords
from ecrm.train.progress import Progress


class Trainer:
    """Drives an engine over a dataset; every live rank runs one and calls the same methods.

    `tell` gets this rank's `Progress`, `event(fields)` what happens; `asked()` is the signal that
    asks it to stop, None before.
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
    ) -> None:
        self._engine, self._dataset, self._steps = engine, dataset, steps
        self._record, self._asked = record, asked
        self._checkpoints, self._data_began = checkpoints, data_began
        self._watch = watch or FiniteWatch(stop=True, window=1, tell=lambda fields: None)
        self._global_batch = config.train.global_batch
        self._offsets = torch.tensor(engine.state.spaces[0].offsets)
        self._progress = Progress(steps, self._global_batch, config.train.log_every_steps, tell)
        self._progress.begins_at(engine)
        self._evaluator = Evaluator(
            engine,
            dataset,
            config,
            steps,
            history or History(),
            self._watch,
            checkpoints,
            self._progress,
            event,
        )
        self._ending = Ending(
            engine,
            config,
            steps,
            record,
            checkpoints,
            self._progress,
            LastWords(engine, self._evaluator, self._global_batch),
        )
        self._kept: dict[tuple[int, int], SlotBatch] = {}
        self._computed: Computed[SlotResult] = Computed()
        self._readings = Readings(engine, dataset)

    @property
    def stopped(self) -> bool:
        """Whether the run has ended because it was asked to stop."""
        return self._ending.stopped

    @property
    def unkept(self) -> str:
        """Why there is no checkpoint of the end though there was to be one; empty otherwise."""
        return self._ending.unkept

    def run(self) -> dict[str, Any] | None:
        """Train to the end, whatever dies on the way; the summary on the reporter, None elsewhere.

        None on every rank, and `stopped`, when one was asked to stop. Raises Unrecoverable on every
        rank when too much is lost, NotFinite when a loss is not, DataError as `Readings.compare`
        does, EcrmError when no rank can write the run folder.
        """
        self._progress.restart_clock()
        recovered, number = False, None
        while True:
            try:
                if recovered and self._engine.recovery.doubted:
                    self._readings.compare()
                heard, recovered = recovered, False
                try:
                    if number is None:
                        return self._train(heard)
                    self._ending.stop(number)
                    return None
                except StopAgreed:  # while stopping, too: what it writes may not fit
                    number = agree_on_stop(self._engine, self._asked(), self._record.folder)
                    continue
            except StepAborted:
                pass
            except DataError as error:
                if recovered:
                    raise
                self._readings.failed(error)
            recovered, number = True, None
            self._evaluator.went_back()
            self._progress.went_back(self._engine)
            if self._checkpoints is not None:
                self._checkpoints.went_back()
            self._ending.went_back()

    def _train(self, heard: bool) -> dict[str, Any] | None:
        """Train to the end, and end the run.

        Unless all have `heard` in a recovery whether one asks to stop, they ask each other first.
        """
        engine, evaluator = self._engine, self._evaluator
        if not heard:
            engine.heed_stop()
        elif engine.recovery.stopping:
            raise StopAgreed
        evaluator.ended_early = None
        while engine.step < self._steps:
            if self._checkpoints is not None:
                self._checkpoints.between_steps()
            if evaluator.is_due(engine.step):
                evaluator.evaluate()
                if evaluator.ended_early is not None:
                    break
            self._train_step()
            if engine.recovery.stopping:
                raise StopAgreed
        return self._ending.finish()

    def _train_step(self) -> None:
        engine = self._engine
        step = engine.step
        engine.enter("input")
        batches = self._batches(step)
        results = self._compute(batches)
        row_gradients = {slot: [result.gradients] for slot, result in results.items()}
        contributions = {slot: result.contribution for slot, result in results.items()}
        troubles = {slot: result.trouble for slot, result in results.items() if result.trouble}
        notes = {
            slot: self._progress.note(
                step, result.contribution[-1:], result.logits, batches[slot].labels
            )
            for slot, result in results.items()
        }
        last = step + 1 == self._steps
        rows_ahead = rows_soon = None
        if not last and not self._evaluator.is_due(step + 1):
            rows_ahead = {slot: [batch.rows] for slot, batch in self._batches(step + 1).items()}
            if engine.repairs_ahead and step + 2 < self._steps:
                rows_soon = {slot: [batch.rows] for slot, batch in self._batches(step + 2).items()}
        if troubles:
            troubles = self._watch.worth_saying(step, troubles)
        engine.apply(
            row_gradients,
            contributions,
            commit=last,
            rows_ahead=rows_ahead,
            rows_soon=rows_soon,
            notes=notes,
            troubles=troubles,
        )
        if self._record.profile is not None:
            self._record.profile.step_finished()
        self._progress.step_finished(engine)

    def _compute(self, batches: dict[int, SlotBatch]) -> dict[int, SlotResult]:
        """Look up the rows of batches, and run forward and backward; results of before are kept."""
        engine = self._engine
        self._computed.begin(engine)
        rows = {slot: [batch.rows] for slot, batch in batches.items()}
        values = engine.lookup(rows, self._computed.keys() & batches.keys(), apply_follows=True)
        engine.enter("forward")
        forwards = {}
        for slot, (looked_up,) in values.items():
            sums = engine.gradient_buffer(slot, 0, len(looked_up))
            forwards[slot] = forward(
                dense_of(engine), batches[slot], looked_up, self._global_batch, sums
            )
        engine.enter("backward")
        for slot, between in forwards.items():
            result = backward(dense_of(engine), between)
            if not math.isfinite(result.loss):
                where = origin(
                    dense_of(engine).module, between.batch, between.values, engine.state.spaces[0]
                )
                result = replace(result, trouble=where)
            self._computed[slot] = result
        return {slot: self._computed[slot] for slot in batches}

    def _batches(self, step: int) -> dict[int, SlotBatch]:
        """The batch of a step of every slot that this rank runs.

        Batches of steps around the engine's are kept.
        """
        engine = self._engine
        for slot in engine.slots:
            if (step, slot) not in self._kept:
                dense, ids, labels = self._dataset.batch_for(
                    step - self._data_began, slot, len(engine.view.slots), self._global_batch
                )
                self._kept[step, slot] = SlotBatch.of(dense, ids, labels, self._offsets)
        self._kept = {
            key: batch for key, batch in self._kept.items() if -1 <= key[0] - engine.step <= 2
        }
        return {slot: self._kept[step, slot] for slot in engine.slots}

"""The training loop of one rank: batches in, engine steps, evaluation, and the summary at the end."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch

from ecrm.config.schema import Config
from ecrm.data.dataset import CriteoDataset
from ecrm.engine.digest import table_digests
from ecrm.engine.engine import Engine, Memory, StepAborted
from ecrm.errors import DataError
from ecrm.model.batch import SlotBatch, backward, forward
from ecrm.protection.base import VerifyReport
from ecrm.train.evaluate import Evaluation, evaluate
from ecrm.train.progress import Progress
from ecrm.train.readings import Readings
from ecrm.train.resident import resident_bytes
from ecrm.train.run_folder import RunFolder


class Trainer:
    """Drives an engine over a dataset; every live rank runs one and calls the same methods."""

    def __init__(
        self,
        engine: Engine,
        dataset: CriteoDataset,
        config: Config,
        steps: int,
        folder: RunFolder,
        about: dict[str, Any],
    ) -> None:
        self._engine, self._dataset, self._config, self._steps = engine, dataset, config, steps
        self._folder, self._about = folder, about
        self._global_batch = config.train.global_batch
        self._offsets = torch.tensor(engine.spaces[0].offsets)
        self._progress = Progress(steps, self._global_batch, config.train.log_every_steps, folder)
        self._readings = Readings(engine, dataset)
        self._evaluated_at = 0
        self._started = time.monotonic()
        self._training_seconds: float | None = None

    def run(self) -> dict[str, Any] | None:
        """Train to the end, whatever dies on the way; the summary on the reporter, None elsewhere.

        Raises Unrecoverable on every rank when too much is lost, DataError as `Readings.compare` does.
        """
        self._progress.restart_clock()
        recovered = False
        while True:
            try:
                if recovered:
                    self._readings.compare()
                    recovered = False
                while self._engine.step < self._steps:
                    if self._evaluation_is_due():
                        self._evaluate()
                    self._train_step()
                return self._finish()
            except StepAborted:
                pass
            except DataError as error:
                if recovered:
                    raise
                self._readings.failed(error)
            recovered = True
            self._evaluated_at = 0  # ranks may differ in whether they had finished evaluating
            self._progress.went_back(self._engine)

    def _evaluation_is_due(self) -> bool:
        every = self._config.train.eval_every_steps
        step = self._engine.step
        return bool(every) and step > 0 and step % every == 0 and step != self._evaluated_at

    def _train_step(self) -> None:
        engine = self._engine
        step = engine.step
        engine.enter("input")
        batches: dict[int, SlotBatch] = {}
        for slot in engine.slots:
            dense, ids, labels = self._dataset.batch_for(step, slot, len(engine.view.slots), self._global_batch)
            batches[slot] = SlotBatch.of(dense, ids, labels, self._offsets)
        values = engine.lookup({slot: [batch.rows] for slot, batch in batches.items()})
        engine.enter("forward")
        ahead = {
            slot: forward(engine.dense, batch, values[slot][0], self._global_batch) for slot, batch in batches.items()
        }
        engine.enter("backward")
        row_gradients, contributions = {}, {}
        for slot, between in ahead.items():
            gradients, contributions[slot] = backward(engine.dense, between)
            row_gradients[slot] = [gradients]
        engine.apply(row_gradients, contributions, commit=step + 1 == self._steps)
        for slot in sorted(ahead):
            self._progress.scored(ahead[slot].batch.labels, ahead[slot].probabilities)
        self._progress.step_finished(engine)

    def _evaluate(self) -> Evaluation | None:
        result = evaluate(self._engine, self._dataset, self._offsets, self._global_batch)
        self._evaluated_at = self._engine.step
        if result is not None:
            self._folder.event(
                {
                    "event": "evaluation",
                    "step": self._engine.step,
                    "samples": result.samples,
                    "auc": result.auc,
                    "log_loss": result.log_loss,
                }
            )
            if result.samples:
                area = "-" if result.auc is None else f"{result.auc:.4f}"
                print(f"evaluation at step {self._engine.step}: auc {area}  log loss {result.log_loss:.4f}", flush=True)
        self._progress.restart_clock()
        return result

    def _finish(self) -> dict[str, Any] | None:
        """Rebuild what is left, evaluate, verify, take the digests, write the summary, and agree that it is so.

        The reporter drafts summary.json; once all have agreed, whichever rank comes first gives it its name.
        """
        engine = self._engine
        if self._training_seconds is None:
            self._training_seconds = time.monotonic() - self._started
        engine.enter("finish")
        engine.rebuild_all()
        resident = resident_bytes()  # before the digests and the check of parity, which read everything
        evaluation = self._evaluate()
        verified = engine.verify_parity() if self._config.protection.verify_parity_at_end else None
        with engine.recovering():
            tables = table_digests(engine, engine.view.reporter)
            memory = engine.memory()
            self._add_resident(memory, resident)
            summary = None
            if engine.rank == engine.view.reporter:
                summary = self._summary(tables, evaluation, verified, memory, self._training_seconds)
                self._folder.draft_summary(summary)
            engine.transport.agree(True)
        self._folder.publish_summary()
        return summary

    def _add_resident(self, memory: Memory, mine: tuple[int, int]) -> None:
        """Collective: complete each rank's entry by what it really holds, and held at most."""
        shared = self._engine.transport.share([torch.tensor(mine)])
        for entry in memory.per_rank:
            entry["resident"], entry["resident_peak"] = shared[entry["rank"]][0].tolist()

    def _summary(
        self,
        tables: dict[str, str],
        evaluation: Evaluation,
        verified: VerifyReport | None,
        memory: Memory,
        training_seconds: float,
    ) -> dict[str, Any]:
        engine, protection = self._engine, self._engine.protection
        dense_digest = hashlib.sha256()
        for tensor in engine.dense.state_tensors:
            dense_digest.update(tensor.contiguous().numpy())
        model_digest = hashlib.sha256("".join((*tables.values(), dense_digest.hexdigest())).encode())
        samples = engine.step * self._global_batch
        return {
            "steps": engine.step,
            "samples": samples,
            "training_seconds": training_seconds,
            "samples_per_second": samples / training_seconds,
            "train_logloss": float(engine.dense.loss_sum) / engine.step,
            "eval_logloss": evaluation.log_loss,
            "eval_auc": evaluation.auc,
            "eval_samples": evaluation.samples,
            "tables": tables,
            "dense_sha256": dense_digest.hexdigest(),
            "model_sha256": model_digest.hexdigest(),
            "step_seconds": self._progress.quantiles(),
            "memory_bytes": memory.total,
            "memory_bytes_per_rank": memory.per_rank,
            "protection": {"name": protection.name, "k": protection.shape.k, "m": protection.shape.m},
            "parity": None if verified is None else {"stripes": verified.stripes, "mismatches": verified.mismatches},
            "failures": [failure.to_dict() for failure in engine.failures.failures],
            "failures_left": engine.failures_left,
            **self._about,
        }

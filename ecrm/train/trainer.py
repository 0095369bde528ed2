"""The training loop of one rank: batches in, engine steps, evaluation, and the summary at the end."""

from __future__ import annotations

import hashlib
import math
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from ecrm.checkpoint.keeper import Checkpoints
from ecrm.config.schema import Config
from ecrm.console import say
from ecrm.data.dataset import CriteoDataset
from ecrm.engine.computed import Computed
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import StepAborted, StopAgreed
from ecrm.engine.memory_count import Memory
from ecrm.engine.table_digest import table_digests
from ecrm.errors import DataError, ParityMismatch
from ecrm.model.slot_batch import SlotBatch, SlotResult, backward, forward
from ecrm.process.agreed_stop import meet
from ecrm.process.memory import resident_bytes
from ecrm.protection.base import VerifyReport
from ecrm.run.auto_resume import lives_of
from ecrm.run.run_folder import RunFolder
from ecrm.train.bad_data import Readings
from ecrm.train.evaluate import Evaluation, evaluate
from ecrm.train.finite import FiniteWatch, origin
from ecrm.train.history import FALLS, History
from ecrm.train.profile import Profile, chrome_trace, gather, table
from ecrm.train.progress import Progress, Tell
from ecrm.train.traffic import Traffic
from ecrm.train.traffic import gather as gather_traffic
from ecrm.wording import counted


class Trainer:
    """Drives an engine over a dataset; every live rank runs one and calls the same methods.

    `tell` gets this rank's `Progress`; `asked()` is the signal that asks it to stop, None before.
    """

    def __init__(
        self,
        engine: Engine,
        dataset: CriteoDataset,
        config: Config,
        steps: int,
        folder: RunFolder,
        about: dict[str, Any],
        traffic: Traffic,
        profile: Profile | None = None,
        tell: Tell = lambda step, make: None,
        asked: Callable[[], signal.Signals | None] = lambda: None,
        checkpoints: Checkpoints | None = None,
        watch: FiniteWatch | None = None,
        data_began: int = 0,
        history: History | None = None,
        event: Callable[[dict[str, Any]], None] = lambda fields: None,
    ) -> None:
        self.stopped, self.unkept = False, ""
        self._watch = watch or FiniteWatch(stop=True, window=1, tell=lambda fields: None)
        self._history, self._event = history or History(), event
        self._ended_early: dict[str, Any] | None = None
        self._checkpoints, self._first_step, self._data_began = checkpoints, engine.step, data_began
        self._asked = asked
        self._engine, self._dataset, self._config, self._steps = engine, dataset, config, steps
        self._folder, self._about, self._traffic, self._profile = folder, about, traffic, profile
        self._global_batch = config.train.global_batch
        self._offsets = torch.tensor(engine.state.spaces[0].offsets)
        self._progress = Progress(steps, self._global_batch, config.train.log_every_steps, tell)
        self._progress.begins_at(engine)
        self._kept: dict[tuple[int, int], SlotBatch] = {}
        self._computed: Computed[SlotResult] = Computed()
        self._readings = Readings(engine, dataset)
        self._evaluated_at = 0
        self._started = time.monotonic()
        self._training_seconds: float | None = None

    def run(self) -> dict[str, Any] | None:
        """Train to the end, whatever dies on the way; the summary on the reporter, None elsewhere.

        None on every rank, and `stopped`, when one was asked to stop; `unkept` says why there is no
        checkpoint of the end. Raises Unrecoverable on every rank when too much is lost, NotFinite
        when a loss is not, DataError as `Readings.compare` does, EcrmError when no rank can write
        the run folder.
        """
        self._progress.restart_clock()
        recovered, number = False, None
        while True:
            try:
                if recovered and self._engine.recovery.doubted:
                    self._readings.compare()
                heard, recovered = recovered, False
                try:
                    return self._train(heard) if number is None else self._stop(number)
                except StopAgreed:  # while stopping, too: what it writes may not fit
                    number = meet(self._engine, self._asked(), self._folder)
                    continue
            except StepAborted:
                pass
            except DataError as error:
                if recovered:
                    raise
                self._readings.failed(error)
            recovered, number = True, None
            self._evaluated_at = 0  # ranks may differ in whether they had finished evaluating
            self._progress.went_back(self._engine)
            if self._checkpoints is not None:
                self._checkpoints.went_back()
            if self._engine.step < self._steps:
                self._training_seconds = None  # rolled back from the end

    def _train(self, heard: bool) -> dict[str, Any] | None:
        """To the end; unless all have `heard` in a recovery whether one asks to stop, they ask each other first."""
        if not heard:
            self._engine.heed_stop()
        elif self._engine.recovery.stopping:
            raise StopAgreed
        self._ended_early = None
        while self._engine.step < self._steps:
            if self._checkpoints is not None:
                self._checkpoints.between_steps()
            if self._evaluation_is_due(self._engine.step):
                self._evaluate()
                if self._ended_early is not None:
                    break
            self._train_step()
            if self._engine.recovery.stopping:
                raise StopAgreed
        return self._finish()

    def _evaluation_is_due(self, step: int) -> bool:
        every = self._config.train.eval_every_steps
        return bool(every) and step > 0 and step % every == 0 and step != self._evaluated_at

    def _train_step(self) -> None:
        engine = self._engine
        step = engine.step
        engine.enter("input")
        batches = self._batches(step)
        self._computed.begin(engine)
        rows = {slot: [batch.rows] for slot, batch in batches.items()}
        values = engine.lookup(rows, self._computed.keys() & batches.keys(), apply_follows=True)
        engine.enter("forward")
        forwards = {}
        for slot, (looked_up,) in values.items():
            sums = engine.gradient_buffer(slot, 0, len(looked_up))
            forwards[slot] = forward(
                engine.state.dense, batches[slot], looked_up, self._global_batch, sums
            )
        engine.enter("backward")
        for slot, between in forwards.items():
            result = backward(engine.state.dense, between)
            if not math.isfinite(result.loss):
                where = origin(
                    engine.state.dense.module, between.batch, between.values, engine.state.spaces[0]
                )
                result = replace(result, trouble=where)
            self._computed[slot] = result
        results = {slot: self._computed[slot] for slot in batches}
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
        if not last and not self._evaluation_is_due(step + 1):
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
        if self._profile is not None:
            self._profile.step_finished()
        self._progress.step_finished(engine)

    def _batches(self, step: int) -> dict[int, SlotBatch]:
        """The batch of a step of every slot that this rank runs; those of steps around the engine's are kept."""
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

    def _evaluate(self, keep: bool = True) -> Evaluation:
        stand_in = self._engine.state.protection.stand_in
        away = [] if stand_in is None else sorted(stand_in.away)
        result = evaluate(self._engine, self._dataset, self._offsets, self._global_batch)
        self._evaluated_at = self._engine.step
        if result.not_finite is not None:
            self._watch.evaluation(self._engine.step, *result.not_finite)
        self._event(
            {
                "event": "evaluation",
                "step": self._engine.step,
                "samples": result.samples,
                "auc": result.auc,
                "auc_error": result.auc_error,
                "log_loss": result.log_loss,
                "shards_away": away,
            }
        )
        self._judge(result, keep)
        self._progress.restart_clock()
        return result

    def _judge(self, result: Evaluation, keep: bool) -> None:
        """Collective: `keep` the model of the best evaluation, tell of overfitting, and find out whether training ends here."""
        engine, history, step = self._engine, self._history, self._engine.step
        history.add(step, result)
        self._last_evaluation, self._ended_early = result, None
        if history.best is None:
            return
        if keep and self._config.checkpoint.keep_best != "none" and history.best.step == step:
            self._checkpoints.keep_best()
        if history.overfit is not None:
            before, last = history.overfit
            self._event(
                {
                    "event": "overfitting",
                    "step": step,
                    "evaluations": FALLS,
                    "auc": last.auc,
                    "auc_before": before.auc,
                    "step_before": before.step,
                }
            )
        patience = self._config.train.stop_after_evaluations_without_gain
        if patience and history.without_gain >= patience and engine.step < self._steps:
            best = history.in_words(history.best)
            why = f"none of {history.without_gain} evaluations since was better than {best}"
            self._ended_early = {
                "step": step,
                "steps_wanted": self._steps,
                "best_step": history.best.step,
                "why": why,
            }
            self._event({"event": "ended_early", **self._ended_early})

    def _finish(self) -> dict[str, Any] | None:
        """Rebuild what is left, scrub, verify, keep the model, evaluate, take the digests, write the summary, and agree that it is so.

        The reporter drafts summary.json; once all have agreed, whichever rank comes first gives it
        its name. With wrong parity that is rejected.json, and every rank raises ParityMismatch.
        """
        engine = self._engine
        engine.commit()
        if self._training_seconds is None:
            self._training_seconds = time.monotonic() - self._started
        if self._profile is not None:
            with engine.recovery.recovering():
                profiles = gather(self._profile, engine.state.transport, engine.view.reporter)
            if profiles is not None:
                say(table(profiles, engine.step))
                self._folder.trace(chrome_trace(profiles))
                if self._folder.path is not None and self._folder.trouble is None:
                    trace = self._folder.path / "trace.json"
                    say(
                        f"trace of the last steps in {trace}, for chrome://tracing or ui.perfetto.dev"
                    )
        engine.enter("finish")
        engine.rebuild_all()
        # before what reads everything: scrubbing, the digests, the check of parity
        resident = resident_bytes(self._engine.state.transport.shared_memory)
        engine.scrub_all()
        verified = engine.verify_parity() if self._config.protection.verify_parity_at_end else None
        right = verified is None or not verified.mismatches
        if self._checkpoints is not None and right:
            self._checkpoints.finish()
            self.unkept = self._checkpoints.unkept
        evaluation = (
            self._last_evaluation if self._ended_early is not None else self._evaluate(keep=right)
        )
        with engine.recovery.recovering():
            tables = table_digests(engine, engine.view.reporter)
            memory = engine.state.memory()
            self._add_resident(memory, resident)
            traffic = gather_traffic(
                engine.state.transport, self._traffic.sent, self._written_bytes
            )
            summary = None
            if engine.rank == engine.view.reporter:
                summary = self._summary(
                    tables, evaluation, verified, memory, traffic, self._training_seconds
                )
                self._folder.draft_summary(summary, completed=right)
            if not engine.state.transport.agree(
                self._folder.trouble is None or engine.rank != engine.view.reporter
            ):
                raise StopAgreed
        self._folder.publish_summary(completed=right)
        if not right:
            where = (
                ""
                if self._folder.path is None
                else f"; what it came to is in {self._folder.path / 'rejected.json'}"
            )
            raise ParityMismatch(
                f"{verified.mismatches:,} of {verified.stripes:,} {engine.state.protection.redundancy} do not match the rows they protect after the last "
                f"step: the model cannot be trusted{where}"
            )
        return summary

    def _stop(self, number: signal.Signals) -> None:
        """Commit, write a checkpoint if there are any, then stopped.json in the way of summary.json, and say so."""
        engine = self._engine
        engine.commit()
        kept = 0
        if self._checkpoints is not None:
            self._checkpoints.stop(self._config.cluster.stop_seconds / 2)  # the rest is for writing
            self.unkept = self._checkpoints.unkept
        with engine.recovery.recovering():
            if engine.rank == engine.view.reporter:
                kept = self._checkpoints.newest if self._checkpoints is not None else 0
                self._folder.draft_stopped({**self._how_far(number), **self._kept_in_summary(kept)})
            if not engine.state.transport.agree(
                self._folder.trouble is None or engine.rank != engine.view.reporter
            ):
                raise StopAgreed
        self._folder.publish_stopped()
        self.stopped = True
        if engine.rank == engine.view.reporter:
            when = (
                f"after step {engine.step} of {self._steps}"
                if engine.step
                else "before the first step"
            )
            loss = (
                f", log loss {float(engine.state.dense.loss_sum) / engine.step:.4f}"
                if engine.step
                else ""
            )
            where = (
                f" in {self._folder.path / 'stopped.json'}" if self._folder.path is not None else ""
            )
            checkpoint = f", checkpoint of step {kept}" if kept else ""
            say(
                f"stopped by {number.name} {when}; {counted(engine.step * self._global_batch, 'sample')}{loss}, "
                f"{counted(len(engine.state.failures.failures), 'failure')} survived{checkpoint}{where and ';'}{where}"
            )

    def _how_far(self, number: signal.Signals) -> dict[str, Any]:
        engine = self._engine
        return {
            "steps": engine.step,
            "steps_wanted": self._steps,
            "samples": engine.step * self._global_batch,
            "train_logloss": float(engine.state.dense.loss_sum) / engine.step
            if engine.step
            else None,
            "signal": number.name,
            "failures": [failure.to_dict() for failure in engine.state.failures.failures],
            "interruptions": engine.state.failures.interruptions,
            "failures_left": engine.state.failures_left,
            "seconds": time.monotonic() - self._started,
        }

    def _kept_in_summary(self, step: int) -> dict[str, Any]:
        return {"checkpoint_step": step or None, "checkpoint_failed": self.unkept or None}

    @property
    def _written_bytes(self) -> int:
        return self._engine.state.protection.written_bytes + (
            0 if self._checkpoints is None else self._checkpoints.written_bytes
        )

    def _add_resident(self, memory: Memory, mine: tuple[int, int]) -> None:
        """Collective: complete each rank's entry by what it really holds, and held at most, and whether it is an unused spare."""
        view = self._engine.view
        shared = self._engine.state.transport.share([torch.tensor(mine)])
        for entry in memory.per_rank:
            entry["resident"], entry["resident_peak"] = shared[entry["rank"]][0].tolist()
            entry["unused_spare"] = entry["rank"] in view.spares and entry["rank"] not in view.dense

    def _summary(
        self,
        tables: dict[str, str],
        evaluation: Evaluation,
        verified: VerifyReport | None,
        memory: Memory,
        traffic: list[dict[str, Any]],
        training_seconds: float,
    ) -> dict[str, Any]:
        engine, protection = self._engine, self._engine.state.protection
        dense_digest = hashlib.sha256()
        for tensor in engine.state.dense.state_tensors:
            dense_digest.update(tensor.contiguous().numpy())
        model_digest = hashlib.sha256(
            "".join((*tables.values(), dense_digest.hexdigest())).encode()
        )
        samples = engine.step * self._global_batch
        return {
            "steps": engine.step,
            "samples": samples,
            "training_seconds": training_seconds,
            "samples_per_second": (samples - self._first_step * self._global_batch)
            / training_seconds,
            "train_logloss": float(engine.state.dense.loss_sum) / engine.step,
            "eval_logloss": evaluation.log_loss,
            "eval_auc": evaluation.auc,
            "eval_auc_error": evaluation.auc_error,
            "eval_samples": evaluation.samples,
            "tables": tables,
            "dense_sha256": dense_digest.hexdigest(),
            "model_sha256": model_digest.hexdigest(),
            "step_seconds": self._progress.quantiles(),
            "memory_bytes": memory.total,
            "memory_bytes_per_rank": memory.per_rank,
            "traffic_bytes_per_rank": traffic,
            "protection": {
                "name": protection.name,
                "k": protection.shape.k,
                "m": protection.shape.m,
                "exact": protection.exact,
            },
            "parity": None
            if verified is None
            else {"stripes": verified.stripes, "mismatches": verified.mismatches},
            "scrub": None if engine.state.scrub is None else asdict(engine.state.scrub.report),
            "failures": [failure.to_dict() for failure in engine.state.failures.failures],
            "interruptions": engine.state.failures.interruptions,
            "restored": engine.state.failures.restored,
            "ended_early": self._ended_early,
            "failures_left": engine.state.failures_left,
            "lives": lives_of(self._folder.all_events(), "complete"),
            **self._kept_in_summary(0 if self._checkpoints is None else self._checkpoints.newest),
            "kernels_ran": {
                operation: took
                for rank in traffic
                for operation, took in sorted(rank["kernels"].items())
            },
            **self._about,
        }

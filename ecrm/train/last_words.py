"""The built-in trainer's fields at the end of a run: samples, losses, the last evaluation."""

from __future__ import annotations

from typing import Any

from ecrm.engine.engine import Engine
from ecrm.train.build_engine import dense_of
from ecrm.train.evaluator import Evaluator


class LastWords:
    """The last evaluation of a run, and its fields in the summary."""

    def __init__(self, engine: Engine, evaluator: Evaluator, global_batch: int) -> None:
        self._engine, self._evaluator, self._global_batch = engine, evaluator, global_batch

    def before_summary(self, keep: bool) -> None:
        if self._evaluator.ended_early is None:
            self._evaluator.evaluate(keep)

    def of_summary(self, steps: int, seconds: float) -> dict[str, Any]:
        evaluation = self._evaluator.last
        assert evaluation is not None
        return {
            "samples": self._engine.step * self._global_batch,
            "samples_per_second": steps * self._global_batch / seconds,
            "train_logloss": float(dense_of(self._engine).loss_sum) / self._engine.step,
            "eval_logloss": evaluation.log_loss,
            "eval_auc": evaluation.auc,
            "eval_auc_error": evaluation.auc_error,
            "eval_samples": evaluation.samples,
            "ended_early": self._evaluator.ended_early,
        }

    def of_stopped(self) -> dict[str, Any]:
        step = self._engine.step
        return {
            "samples": step * self._global_batch,
            "train_logloss": float(dense_of(self._engine).loss_sum) / step if step else None,
        }

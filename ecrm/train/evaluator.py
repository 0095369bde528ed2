"""The evaluations of a run: due steps, consequences, and an early end of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ecrm.checkpoint.keeper import Checkpoints
from ecrm.config.schema import Config
from ecrm.data.dataset import CriteoDataset
from ecrm.engine.engine import Engine
from ecrm.run.finite import FiniteWatch
from ecrm.train.evaluate import Evaluation, evaluate
from ecrm.train.history import FALLS, History
from ecrm.train.progress import Progress


class Evaluator:
    """Evaluates an engine's model; every live rank has an Evaluator and calls the same methods.

    `tell(fields)` gets the events. `last` is the last evaluation. `ended_early` has the fields of
    the event of the same name, with the reason to end training; `None` while training goes on.
    """

    def __init__(
        self,
        engine: Engine,
        dataset: CriteoDataset,
        config: Config,
        steps: int,
        history: History,
        watch: FiniteWatch,
        checkpoints: Checkpoints | None,
        progress: Progress,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self._engine, self._dataset, self._config, self._steps = engine, dataset, config, steps
        self._history, self._watch, self._checkpoints = history, watch, checkpoints
        self._progress, self._tell = progress, tell
        self._offsets = torch.tensor(engine.state.spaces[0].offsets)
        self._evaluated_at = 0
        self.last: Evaluation | None = None
        self.ended_early: dict[str, Any] | None = None

    def is_due(self, step: int) -> bool:
        """Whether the model is still to be evaluated after `step` steps."""
        every = self._config.train.eval_every_steps
        within = 0 < step < self._steps  # the end of training evaluates anyway
        return bool(every) and within and step % every == 0 and step != self._evaluated_at

    def do(self) -> bool:
        """Collective: evaluate as `evaluate` does; returns whether training is to end."""
        self.evaluate()
        return self.ended_early is not None

    def went_back(self) -> None:
        """After StepAborted: forget the last evaluation, finished perhaps on some ranks only."""
        self._evaluated_at, self.ended_early = 0, None

    def evaluate(self, keep: bool = True) -> Evaluation:
        """Collective: evaluate now, report the result, and `keep` the model if the best so far.

        Raises NotFinite on every rank if a nonfinite log loss ends the run, and StepAborted after a
        failure.
        """
        engine = self._engine
        stand_in = engine.state.protection.stand_in
        away = [] if stand_in is None else sorted(stand_in.away)
        result = evaluate(engine, self._dataset, self._offsets, self._config.train.global_batch)
        self._evaluated_at = engine.step
        if result.not_finite is not None:
            self._watch.evaluation(engine.step, *result.not_finite)
        self._tell(
            {
                "event": "evaluation",
                "step": engine.step,
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
        """Collective: keep the best model, report overfitting, and decide whether to go on."""
        history, step = self._history, self._engine.step
        history.add(step, result)
        self.last, self.ended_early = result, None
        if history.best is None:
            return
        if keep and self._config.checkpoint.keep_best != "none" and history.best.step == step:
            assert self._checkpoints is not None
            self._checkpoints.keep_best()
        if history.overfit is not None:
            before, last = history.overfit
            self._tell(
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
        if patience and history.without_gain >= patience and step < self._steps:
            best = history.in_words(history.best)
            why = f"none of {history.without_gain} evaluations since was better than {best}"
            self.ended_early = {
                "step": step,
                "steps_wanted": self._steps,
                "best_step": history.best.step,
                "why": why,
            }
            self._tell({"event": "ended_early", **self.ended_early})

"""The progress line, and the times of steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ecrm.engine.engine import Engine
from ecrm.metrics import auc

MOST_SCORED = 256
"""Batches that the AUC of a progress line looks back on at most."""

MOST_FINISHED = 1000
"""Steps between progress events at most, however rarely a line is printed: bounds what a rank keeps and what its death loses."""


class Progress:
    """Every rank keeps the times and calls `tell(fields, in_words)` every `every` steps (0: only at the end).

    With no words it does so every `MOST_FINISHED` steps.
    """

    def __init__(
        self, steps: int, global_batch: int, every: int, tell: Callable[[dict[str, Any], str], None]
    ) -> None:
        self._steps, self._global_batch, self._every, self._tell = steps, global_batch, every, tell
        self.step_seconds: list[float] = []
        self._reported = 0
        self._last = self._window_start = time.monotonic()
        self._finished_at: list[tuple[int, float]] = []
        self._loss_before: tuple[int, float] = (0, 0.0)
        self._labels: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []
        self._rollbacks = 0

    def restart_clock(self) -> None:
        """The time since the last step belongs to no step (start, evaluation)."""
        now = time.monotonic()
        self._window_start += now - self._last
        self._last = now

    def begins_at(self, engine: Engine) -> None:
        """The first step is the engine's next: not 0 in a run that goes on from a checkpoint."""
        self._reported = engine.step
        self._loss_before = (engine.step, float(engine.dense.loss_sum) if engine.dense is not None else 0.0)

    def went_back(self, engine: Engine) -> None:
        """Steps were undone: those after the commit will be finished once more."""
        if engine.rollbacks > self._rollbacks:
            self._rollbacks, self._reported = engine.rollbacks, min(self._reported, engine.step)
        if engine.dense is not None and self._loss_before[0] > engine.step:
            self._loss_before = (engine.step, float(engine.dense.loss_sum))

    def scored(self, labels: torch.Tensor, probabilities: torch.Tensor) -> None:
        """Predictions of a training batch on this rank, for the AUC of the next line."""
        self._labels.append(labels)
        self._scores.append(probabilities)
        if len(self._labels) > MOST_SCORED:
            del self._labels[0], self._scores[0]

    def step_finished(self, engine: Engine) -> None:
        """Count a finished step; print and write when due."""
        now = time.monotonic()
        self.step_seconds.append(now - self._last)
        self._last = now
        self._finished_at.append((engine.step, time.time()))
        line = engine.step == self._steps or (self._every and engine.step % self._every == 0)
        if (line or len(self._finished_at) >= MOST_FINISHED) and engine.step > self._reported:
            self._reported = engine.step
            self._report(engine, now, line)
            self._window_start = now
            self._finished_at, self._labels, self._scores = [], [], []
            if engine.dense is not None:
                self._loss_before = (engine.step, float(engine.dense.loss_sum))

    def _report(self, engine: Engine, now: float, line: bool) -> None:
        rate = len(self._finished_at) * self._global_batch / max(now - self._window_start, 1e-9)
        loss = area = None
        if engine.dense is not None:
            step, loss_sum = self._loss_before
            loss = (float(engine.dense.loss_sum) - loss_sum) / max(engine.step - step, 1)
        if self._labels and engine.rank == engine.view.reporter:
            area = auc(torch.cat(self._labels).numpy(), torch.cat(self._scores).numpy())
        self._tell(
            {
                "step": engine.step,
                "committed": engine.committed,
                "samples_per_second": rate,
                "loss": loss,
                "auc": area,
                "failures_left": engine.failures_left,
                "rebuilt": engine.rebuild_fraction,
                "finished": self._finished_at,
            },
            ""
            if not line
            else f"step {engine.step:>{len(str(self._steps))}}/{self._steps}  {rate:>9,.0f} samples/s  "
            f"loss {'-' if loss is None else f'{loss:.4f}'}  auc {'-' if area is None else f'{area:.4f}'}  "
            f"committed {engine.committed}  failures left {engine.failures_left}  rebuilt {engine.rebuild_fraction:.0%}",
        )

    def quantiles(self) -> dict[str, float | None]:
        """Median, 99th percentile and maximum of the seconds a step took on this rank."""
        if not self.step_seconds:
            return {"p50": None, "p99": None, "max": None}
        seconds = np.array(self.step_seconds)
        return {
            "p50": float(np.quantile(seconds, 0.5)),
            "p99": float(np.quantile(seconds, 0.99)),
            "max": float(seconds.max()),
        }

"""What the evaluations of a run have come to: which is the best, when there is no gain any more, when the model overfits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ecrm.train.evaluate import Evaluation

FALLS = 3
"""Evaluations in a row with a falling AUC that are worth a warning."""


@dataclass(frozen=True)
class Measured:
    """An evaluation: `step` steps trained, AUC, log loss, and the sum of the mean training losses of these steps."""

    step: int
    auc: float
    log_loss: float
    train_loss: float


class History:
    """Evaluations in the order of their steps; a function of the model alone, whatever died on the way.

    `by` is `auc` or `logloss`, what tells the better of two. `entries`, as `to_json` gave them, are
    those of a run that this one goes on with.
    """

    def __init__(self, by: str = "auc", entries: Iterable[list[float]] = ()) -> None:
        self._by = by
        self._all = [Measured(int(step), *rest) for step, *rest in entries]

    def add(self, step: int, evaluation: Evaluation) -> None:
        """The evaluation after `step` steps; later ones are forgotten, since those steps are done again."""
        self._all = [measured for measured in self._all if measured.step < step]
        if evaluation.auc is not None:
            self._all.append(
                Measured(step, evaluation.auc, evaluation.log_loss, evaluation.train_loss)
            )

    def to_json(self, below: int) -> list[list[float]]:
        """The evaluations before step `below`, for `entries` of the run that begins there."""
        return [[m.step, m.auc, m.log_loss, m.train_loss] for m in self._all if m.step < below]

    @property
    def best(self) -> Measured | None:
        """The first of the best evaluations, None where there is none."""
        return max(self._all, key=self._merit, default=None)

    def _merit(self, measured: Measured) -> float:
        return measured.auc if self._by == "auc" else -measured.log_loss

    @property
    def without_gain(self) -> int:
        """How many evaluations there were since the best."""
        return sum(measured.step > self.best.step for measured in self._all)

    def in_words(self, measured: Measured) -> str:
        """An evaluation by what counts of it."""
        value = (
            f"auc {measured.auc:.4f}" if self._by == "auc" else f"log loss {measured.log_loss:.4f}"
        )
        return f"{value} at step {measured.step}"

    @property
    def overfit(self) -> tuple[Measured, Measured] | None:
        """(the evaluation before, the last) where the AUC has just fallen the FALLS-th time in a row while the training loss fell."""
        falls = [
            after.auc < before.auc for before, after in zip(self._all, self._all[1:], strict=False)
        ]
        if len(falls) < FALLS or not all(falls[-FALLS:]) or falls[-FALLS - 1 : -FALLS] == [True]:
            return None
        means = self._training_losses()
        return (self._all[-FALLS - 1], self._all[-1]) if means[-1] < means[-FALLS - 1] else None

    def _training_losses(self) -> list[float]:
        """The mean training loss of the steps before each evaluation, since the one before it."""
        means, step, total = [], 0, 0.0
        for measured in self._all:
            means.append((measured.train_loss - total) / (measured.step - step))
            step, total = measured.step, measured.train_loss
        return means

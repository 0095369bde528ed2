"""The evaluations of a run: the best evaluation, gain since, and overfitting."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ecrm.train.evaluate import Evaluation

FALLS = 3
"""The number of successive falls of the AUC worth a warning."""


@dataclass(frozen=True)
class Measured:
    """An evaluation after `step` steps: AUC, log loss, the sum of the steps' mean training losses.

    `None` is an undefined value: the AUC of one class, or a nonfinite value.
    """

    step: int
    auc: float | None
    log_loss: float | None
    train_loss: float | None


class History:
    """Evaluations in the order of their steps.

    The evaluations depend on the model alone, not on deaths. `by` is `auc` or `logloss`, the
    measure for comparing evaluations. `entries`, from `to_json`, are the evaluations of the run to
    be continued.
    """

    def __init__(self, by: str = "auc", entries: Iterable[list[float | None]] = ()) -> None:
        self._by = by
        self._all: list[Measured] = []
        for step, *rest in entries:
            assert step is not None
            self._keep(Measured(int(step), *rest))

    def add(self, step: int, evaluation: Evaluation) -> None:
        """Add the evaluation after `step` steps; drop evaluations of the same and later steps."""
        self._all = [measured for measured in self._all if measured.step < step]
        total = evaluation.train_loss if math.isfinite(evaluation.train_loss) else None
        self._keep(Measured(step, evaluation.auc, evaluation.log_loss, total))

    def _keep(self, measured: Measured) -> None:
        """Keep an evaluation with a defined value of the compared measure."""
        if self._value(measured) is not None:
            self._all.append(measured)

    def _value(self, measured: Measured) -> float | None:
        return measured.auc if self._by == "auc" else measured.log_loss

    def to_json(self, below: int) -> list[list[float | None]]:
        """The evaluations before step `below`, for `entries` of the run beginning there."""
        return [[m.step, m.auc, m.log_loss, m.train_loss] for m in self._all if m.step < below]

    @property
    def best(self) -> Measured | None:
        """The first of the best evaluations, `None` without evaluations."""
        return max(self._all, key=self._merit, default=None)

    def _merit(self, measured: Measured) -> float:
        value = self._value(measured)
        assert value is not None  # `_keep` drops undefined values
        return value if self._by == "auc" else -value

    @property
    def without_gain(self) -> int:
        """The number of evaluations since the best."""
        best = self.best
        return 0 if best is None else sum(one.step > best.step for one in self._all)

    def in_words(self, measured: Measured) -> str:
        """An evaluation in words, by the compared measure."""
        value = (
            f"auc {measured.auc:.4f}" if self._by == "auc" else f"log loss {measured.log_loss:.4f}"
        )
        return f"{value} at step {measured.step}"

    @property
    def overfit(self) -> tuple[Measured, Measured] | None:
        """(the evaluation before the falls, the last) at the beginning of overfitting, else `None`.

        Overfitting begins when the AUC has just fallen the FALLS-th time in a row while the
        training loss fell.
        """
        measured = [one for one in self._all if one.auc is not None]
        areas = [one.auc for one in measured if one.auc is not None]
        falls = [after < before for before, after in zip(areas, areas[1:], strict=False)]
        if len(falls) < FALLS or not all(falls[-FALLS:]) or falls[-FALLS - 1 : -FALLS] == [True]:
            return None
        means = _training_losses(measured)
        before, last = means[-FALLS - 1], means[-1]
        if before is None or last is None or last >= before:
            return None
        return measured[-FALLS - 1], measured[-1]


def _training_losses(evaluations: Iterable[Measured]) -> list[float | None]:
    """The mean training loss of the steps between each evaluation and the evaluation before."""
    means: list[float | None] = []
    step = 0
    total: float | None = 0.0
    for one in evaluations:
        if total is None or one.train_loss is None:
            means.append(None)
        else:
            means.append((one.train_loss - total) / (one.step - step))
        step, total = one.step, one.train_loss
    return means

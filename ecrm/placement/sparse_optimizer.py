"""The optimizers of embedding rows, with learning rates and other numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ecrm.base.errors import UsageError

STATE_WIDTHS: Mapping[str, Callable[[int], tuple[int, ...]]] = {
    "sgd": lambda dim: (),
    "rowwise_adagrad": lambda dim: (1,),
    "adagrad": lambda dim: (dim,),
    "adam": lambda dim: (dim, dim),
}
"""Floats of optimizer state of a row of `dim` floats, a number for each array of state."""
NAMES = tuple(STATE_WIDTHS)


@dataclass(frozen=True)
class SparseOptimizer:
    """The optimizer of rows: `sgd`, `rowwise_adagrad`, `adagrad` or `adam`, with its numbers.

    A step updates only rows with gradients, as sparse optimizers do. So `weight_decay` shrinks only
    rows with gradients, and the moments of `adam` do not change in steps without the row. `adam`
    corrects moments by the step of the run, the same for all rows.

    `betas` are of `adam`, `epsilon` is of all but `sgd`. The decay is `decoupled`, as in AdamW, or
    is added to the gradient as weight_decay times the row (L2). Raises UsageError for an invalid
    name or number.
    """

    name: str
    learning_rate: float
    epsilon: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise UsageError(f"sparse optimizer {self.name!r} is none of {', '.join(NAMES)}")
        for what in ("learning_rate", "epsilon", "weight_decay"):
            number = getattr(self, what)
            if not (math.isfinite(number) and number >= 0):
                raise UsageError(
                    f"sparse optimizer {self.name}: {what} is {number}, it must be 0 or more"
                )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(
                f"sparse optimizer {self.name}: betas are {self.betas}, "
                "each must be at least 0 and less than 1"
            )


SparseRate = Callable[[int], float]
"""A factor on the learning rate of every row, by step from 0: a pure function of the step.

Called several times a step.
"""


def factor(rate: SparseRate | None, step: int) -> float:
    """The factor of `rate` at a step, 1 without `rate`; UsageError if not finite or below 0."""
    if rate is None:
        return 1.0
    said = float(rate(step))
    if not (math.isfinite(said) and said >= 0):
        raise UsageError(
            f"the factor on the rows' learning rate is {said} at step {step}, it must be 0 or more"
        )
    return said

"""A torch scheduler as the factor on the learning rates of rows in each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ecrm.base.errors import UsageError


def rates_of(make: Callable[[torch.optim.Optimizer], Any]) -> Callable[[int], float]:
    """Return step -> the factor of a scheduler for the step, equal on every rank.

    `make(optimizer)` makes the scheduler over an optimizer with learning rate 1. The scheduler is
    stepped once a step, up to the highest requested step, and takes 8 bytes of memory a step.
    Raises UsageError for a scheduler that needs more than the number of steps, such as a loss.
    """
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = make(optimizer)
    known: list[float] = []

    def rate(step: int) -> float:
        while len(known) <= step:
            if known:
                optimizer.step()  # a scheduler warns without a step of the optimizer before
                _step(scheduler)
            known.append(float(optimizer.param_groups[0]["lr"]))
        return known[step]

    rate(1)  # an unusable scheduler raises before training
    return rate


def _step(scheduler: Any) -> None:
    try:
        scheduler.step()
    except TypeError as error:
        raise UsageError(
            f"sparse_scheduler: {type(scheduler).__name__} cannot be stepped by the number of "
            f"steps alone ({error})",
            otherwise="take one that can, such as CosineAnnealingLR",
        ) from None

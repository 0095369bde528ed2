"""torch's GradScaler, for gradients summed elsewhere: its scale, and the updates of its scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from ecrm.base.allocate import CPU


class _CountedScale:
    """The `scale` method of a scaler, with a count of its calls."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scale, self.calls = scaler.scale, 0

    def __call__(self, outputs: Any) -> Any:
        self.calls += 1
        return self._scale(outputs)


class LossScaler:
    """The factor of losses, with a `scaler` updated as in a training loop.

    The scaler gets a new `scale` method, which counts calls. Gradients are divided by the scale on
    the rank of the slot. So torch's scaler never sees the gradients, only a stand-in, finite or
    not. The stand-in is on the `device` of the losses: between devices the scaler copies without a
    wait.
    """

    def __init__(self, scaler: GradScaler, device: torch.device = CPU) -> None:
        self.scaler, self._counted = scaler, _CountedScale(scaler)
        scaler.scale = self._counted  # type: ignore[method-assign]
        self._stand_in = nn.Parameter(torch.zeros(1, device=device))
        self._optimizer = torch.optim.SGD([self._stand_in], lr=0.0)

    @property
    def scale(self) -> float:
        """The present scale; 1 if the scaler is disabled."""
        return self.scaler.get_scale()

    @property
    def calls(self) -> int:
        """The number of `scale` calls so far."""
        return self._counted.calls

    def update(self, skipped: bool) -> None:
        """End a step: the step was `skipped` for a gradient that is not finite, or done."""
        self.scaler.scale(torch.zeros_like(self._stand_in))  # it makes memory at first use
        self._stand_in.grad = torch.full_like(self._stand_in, float("inf") if skipped else 0.0)
        self.scaler.step(self._optimizer)
        self.scaler.update()

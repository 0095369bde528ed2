"""torch's GradScaler, for gradients that are summed elsewhere: its scale, and how that changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from ecrm.base.allocate import CPU


class _CountedScale:
    """The `scale` method of a scaler, which counts how often it is called."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scale, self.calls = scaler.scale, 0

    def __call__(self, outputs: Any) -> Any:
        self.calls += 1
        return self._scale(outputs)


class LossScaler:
    """Says what losses are multiplied with, and updates a `scaler` as a training loop would.

    The scaler gets another `scale`, which counts its calls. Gradients are divided by the scale
    where they are computed. So torch's scaler never sees them, but a stand-in that is finite or
    not. It lies on the `device` of the losses: between devices the scaler copies without a wait.
    """

    def __init__(self, scaler: GradScaler, device: torch.device = CPU) -> None:
        self.scaler, self._counted = scaler, _CountedScale(scaler)
        scaler.scale = self._counted  # type: ignore[method-assign]
        self._stand_in = nn.Parameter(torch.zeros(1, device=device))
        self._optimizer = torch.optim.SGD([self._stand_in], lr=0.0)

    @property
    def scale(self) -> float:
        """The present scale; 1 where the scaler is disabled."""
        return self.scaler.get_scale()

    @property
    def calls(self) -> int:
        """How often the scaler has scaled something so far."""
        return self._counted.calls

    def update(self, skipped: bool) -> None:
        """A step is over: it was `skipped` for a gradient that was not finite, or it was done."""
        self.scaler.scale(torch.zeros_like(self._stand_in))  # before its first use it has no memory
        self._stand_in.grad = torch.full_like(self._stand_in, float("inf") if skipped else 0.0)
        self.scaler.step(self._optimizer)
        self.scaler.update()

"""A replica of the dense model: parameters and optimizer state in one flat buffer each, with the way back to the commit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def _adagrad(parameters: nn.Parameter, rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adagrad([parameters], lr=rate, eps=1e-8)


_OPTIMIZERS = {
    "sgd": lambda p, rate: torch.optim.SGD([p], lr=rate),
    "adagrad": _adagrad,
    "adam": lambda p, rate: torch.optim.Adam([p], lr=rate),
}


class FlatDenseReplica:
    """Holds a module's parameters as views of one flat float32 buffer [P] and steps them with a torch optimizer.

    A slot's contribution is float32 [P + 1]: the gradient of its share of the mean loss, then that
    share itself. `loss_sum` adds up the losses of all steps taken, float64, and is undone with them.
    """

    def __init__(self, module: nn.Module, optimizer: str, learning_rate: float) -> None:
        self.module = module
        parameters = list(module.parameters())
        self._flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parameters]))
        self._gradient = torch.zeros(self._flat.numel() + 1)
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            parameter.data = self._flat.data[start:end].view_as(parameter)
            parameter.grad = self._gradient[start:end].view_as(parameter)
            start = end
        self._optimizer = _OPTIMIZERS[optimizer](self._flat, learning_rate)
        self._flat.grad = torch.zeros_like(self._flat)
        self.loss_sum = torch.zeros(1, dtype=torch.float64)
        self._saved: list[Tensor] | None = None
        self._materialise_state()
        self.commit()

    def _materialise_state(self) -> None:
        """Make the optimizer create its state without moving a parameter."""
        before = self._flat.detach().clone()
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._optimizer.step()
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for tensor in self._state_tensors():
            tensor.zero_()
        assert torch.equal(before, self._flat.detach())

    def _state_tensors(self) -> list[Tensor]:
        state = self._optimizer.state[self._flat]
        return [state[name] for name in sorted(state) if torch.is_tensor(state[name])]

    def _tensors(self) -> list[Tensor]:
        """Everything that a step changes, as the live tensors."""
        return [self._flat.data, *self._state_tensors(), self.loss_sum]

    @property
    def memory_bytes(self) -> int:
        return 2 * sum(tensor.nbytes for tensor in self._tensors())

    @property
    def state_tensors(self) -> list[Tensor]:
        """Parameters, then optimizer state by name: what `dense_sha256` is taken over."""
        return [self._flat.data, *self._state_tensors()]

    def begin_slot(self) -> None:
        """Zero the gradients that the next backward adds to."""
        self._gradient.zero_()

    def contribution(self, loss_share: Tensor) -> Tensor:
        """Copy of the gradients since `begin_slot`, with the slot's share of the loss behind them, float32 [P + 1]."""
        self._gradient[-1] = loss_share
        return self._gradient.clone()

    def apply(self, contributions: Sequence[Tensor]) -> None:
        total = contributions[0].clone()
        for contribution in contributions[1:]:
            total += contribution
        self._flat.grad.copy_(total[:-1])
        self._optimizer.step()
        self.loss_sum += total[-1].double()

    def commit(self) -> None:
        if self._saved is None:
            self._saved = [tensor.clone() for tensor in self._tensors()]
        else:
            for saved, tensor in zip(self._saved, self._tensors(), strict=True):
                saved.copy_(tensor)

    def undo(self) -> None:
        for saved, tensor in zip(self._saved, self._tensors(), strict=True):
            tensor.copy_(saved)

    def export(self) -> list[Tensor]:
        return self._saved

    def load(self, state: Sequence[Tensor]) -> None:
        for received, saved in zip(state, self._saved, strict=True):
            saved.copy_(received.view_as(saved))
        self.undo()

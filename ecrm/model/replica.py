"""A replica of the dense model in flat buffers, which can go back to the last commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from ecrm.base.allocate import CPU
from ecrm.device.copies import on_device, on_host


def _sgd(parameters: Tensor, gradient: Tensor, state: list[Tensor], rate: float) -> None:
    sgd(
        [parameters],
        [gradient],
        [None],
        fused=True,
        lr=rate,
        weight_decay=0.0,
        momentum=0.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )


def _adagrad(parameters: Tensor, gradient: Tensor, state: list[Tensor], rate: float) -> None:
    steps, total = state
    adagrad(
        [parameters],
        [gradient],
        [total],
        [steps],
        fused=True,
        lr=rate,
        weight_decay=0.0,
        lr_decay=0.0,
        eps=EPSILON,
        maximize=False,
    )


def _adam(parameters: Tensor, gradient: Tensor, state: list[Tensor], rate: float) -> None:
    steps, mean, square = state
    adam(
        [parameters],
        [gradient],
        [mean],
        [square],
        [],
        [steps],
        fused=True,
        lr=rate,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.0,
        eps=EPSILON,
        amsgrad=False,
        maximize=False,
    )


# Torch's own update rules in their functional form: the Optimizer class imports torch's compiler,
# 1.8 s on every rank.
_OPTIMIZERS = {"sgd": (_sgd, 0), "adagrad": (_adagrad, 1), "adam": (_adam, 2)}
EPSILON = 1e-8


class FlatDenseReplica:
    """Holds a module's parameters as views of one flat float32 buffer, [P], and updates them.

    The optimizer is one of torch's; its state is flat too. A slot's contribution is float32 [P +
    1]: the gradient of the slot's share of the mean loss, then the share. `loss_sum`, float64, adds
    up the losses of all steps taken and is undone with the steps.

    The module, which comes without buffers, and all state are on `device`, except for `loss_sum`.
    Messages and exported state are on the CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: str,
        learning_rate: float,
        device: torch.device = CPU,
    ) -> None:
        self.module, self.device = module, device
        parameters = list(module.parameters())
        self._flat = on_device(device, torch.cat([p.detach().reshape(-1) for p in parameters]))
        self._gradient = torch.zeros(self._flat.numel() + 1, device=device)
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            parameter.data = self._flat[start:end].view(parameter.shape)
            parameter.grad = self._gradient[start:end].view_as(parameter)
            start = end
        self._update, moments = _OPTIMIZERS[optimizer]
        self._learning_rate = learning_rate
        self._state = [torch.zeros((), device=device)] if moments else []
        self._state += [torch.zeros_like(self._flat) for _ in range(moments)]
        self.loss_sum = torch.zeros(1, dtype=torch.float64)
        self._saved = [tensor.clone() for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        """All tensors changed by a step, live."""
        return [self._flat, *self._state, self.loss_sum]

    over, ends_at = False, -1  # the trainer knows how many steps its data has

    def end_at(self, step: int) -> None:
        raise AssertionError("nobody asks the trainer's model to end before its steps")

    @property
    def memory_bytes(self) -> int:
        return 2 * sum(tensor.nbytes for tensor in self._tensors())

    @property
    def state_tensors(self) -> list[Tensor]:
        """Parameters, then the optimizer's step count and moments, on the CPU.

        `dense_sha256` is the digest of these tensors.
        """
        return on_host(self._flat, *self._state)

    @property
    def entries(self) -> list[tuple[str, object]]:
        """As in `ecrm.engine.dense.DenseReplica`; the tensors are live."""
        moments = [(f"optimizer state {number}", t) for number, t in enumerate(self._state)]
        return [("parameters", self._flat), *moments, ("sum of losses", self.loss_sum)]

    def begin_slot(self) -> None:
        """Zero the gradients before the next backward adds to them."""
        self._gradient.zero_()

    def contribution(self, loss_share: Tensor) -> Tensor:
        """The gradients since `begin_slot`, then the slot's share of the loss, float32 [P + 1].

        A copy, on the CPU. Waits for all copies begun from a GPU.
        """
        self._gradient[-1] = loss_share
        return self._gradient.clone() if self._gradient.is_cpu else on_host(self._gradient)[0]

    def apply(self, total: Tensor, states: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        gradient = on_device(self.device, total[:-1])
        self._update(self._flat, gradient, self._state, self._learning_rate)
        self.loss_sum += total[-1].double()

    def skip(self, states: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        """Does nothing: no state depends on the number of steps."""

    def commit(self) -> None:
        for saved, tensor in zip(self._saved, self._tensors(), strict=True):
            saved.copy_(tensor)

    def undo(self) -> None:
        for saved, tensor in zip(self._saved, self._tensors(), strict=True):
            tensor.copy_(saved)

    def export(self) -> list[Tensor]:
        return on_host(*self._saved)

    def present(self) -> list[Tensor]:
        return on_host(*self._tensors())

    def is_finite(self, state: Sequence[Tensor]) -> bool:
        trained = state[: 1 + len(self._state)]  # not the sum of losses, nor notes of steps
        return all(bool(tensor.isfinite().all()) for tensor in trained)

    def load(self, state: Sequence[Tensor]) -> None:
        # a single tensor is the parameters alone: the rest of the committed state stays
        for received, saved in zip(state, self._saved, strict=len(state) > 1):
            saved.copy_(on_device(saved.device, received).view(saved.shape))
        self.undo()

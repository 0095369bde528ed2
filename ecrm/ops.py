"""Differentiable operations on embedding rows, for a user's own models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ecrm.kernels import dot_interaction as kernel

__all__ = ["dot_interaction"]

Memory = Callable[[], Tensor | None]
"""Gives memory for the gradients of rows, float32 [U, D], contiguous; `None`: take new memory."""


def no_memory() -> None:
    """A `Memory` without any."""


def dot_interaction(dense: Tensor, rows: Tensor, places: Tensor | None = None) -> Tensor:
    """DLRM's dot interaction: a sample's dense row, then the dot products of all pairs of its rows.

    The pairs are those of the dense row and the F embedding rows, in the order of TorchRec's
    InteractionArch. The gradient of a row is a sum in a fixed order.

    Legend: B samples, F features, U rows of D floats.

    Args:
        dense: float32 [B, D].
        rows: float32 [U, D], or [B, F, D] without `places`.
        places: int64 [B * F], sample after sample: the row of each (sample, feature).

    Returns a new float32 [B, D + F (F + 1) / 2].

    Under `torch.autocast`, inputs of 16 bits become float32 first.

    Raises TypeError or ValueError for other shapes and dtypes, with the numbers. Places are not
    checked: each must be a row.
    """
    dense, rows = _full_width(dense, rows)
    if places is None:
        samples, features, _ = rows.shape
        if not samples:  # without samples the kernel cannot tell the number of features
            nothing = dense.new_zeros(0, dense.shape[1] + features * (features + 1) // 2)
            return nothing + dense.sum() + rows.sum()
        rows = rows.reshape(samples * features, -1)
        places = torch.arange(len(rows), device=rows.device)
    return interact(dense, rows, places, no_memory)


class _Interact(torch.autograd.Function):
    """The kernel and its gradients."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, values: Tensor, places: Tensor, memory: Memory) -> Tensor:
        ctx.save_for_backward(dense, values, places)
        ctx.memory = memory
        return kernel.dot_interaction(dense, values, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dense, values, places = ctx.saved_tensors
        of_dense, of_values = kernel.dot_interaction_backward(
            gradients.contiguous(), dense, values, places, sums=unshared(ctx.memory)
        )
        return of_dense, of_values, None, None


_differentiable: Callable[[Tensor, Tensor, Tensor, Memory], Tensor] = _Interact.apply


def interact(dense: Tensor, rows: Tensor, places: Tensor, memory: Memory) -> Tensor:
    """The dot interaction of fetched rows, with the memory for their gradients."""
    return _differentiable(*_full_width(dense, rows), places, memory)


def _full_width(dense: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Under `torch.autocast`, 16 bits as float32, as for torch's operations that need float32."""
    if not torch.is_autocast_enabled(dense.device.type):
        return dense, rows
    short = (torch.bfloat16, torch.float16)
    return (
        dense.float() if dense.dtype in short else dense,
        rows.float() if rows.dtype in short else rows,
    )


def unshared(memory: Memory) -> Tensor | None:
    """Memory as a new tensor: autograd copies a tensor referenced elsewhere too."""
    sums = memory()
    return None if sums is None else sums.detach()

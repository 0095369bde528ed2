"""Rows brought to where they are used, one by one or pooled.

Gradients of a row are summed in the order of its uses, with any number of threads. Torch's own
operations promise no order, and take up to ten times as long.

Legend: U rows of D floats, n places among them, B bags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from ecrm.kernels.scatter_add import scatter_add


def pool(
    rows: Tensor, places: Tensor, lengths: Tensor, mode: str, weights: Tensor | None = None
) -> Tensor:
    """Sums or means of bags of rows, float32 [B, D]; an empty bag gives zeros.

    `rows` is float32 [U, D]; `places`, int64 [n], says which row each use is. Bag after bag,
    `lengths`, int64 [B], says how many uses are in it. `mode` is `sum` or `mean`. Rows are
    multiplied by `weights`, float32 [n], if that is given, and then `mode` is `sum`.
    """
    return _pool(rows, places, lengths, mode, weights)


def spread(rows: Tensor, places: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies of rows, [U, D]: a tensor [n, D] for each of the `places`, int64 [n]."""
    return _spread(rows, *places)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, places: Tensor, lengths: Tensor, mode: str, weights: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(rows, places, lengths, weights)
        ctx.mode = mode
        ends = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
        return embedding_bag(
            places, rows, ends, mode=mode, per_sample_weights=weights, include_last_offset=True
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, places, lengths, weights = ctx.saved_tensors
        gradients, of_rows, of_weights = gradients.contiguous(), torch.zeros_like(rows), None
        bags = torch.repeat_interleave(lengths, output_size=places.numel())
        if ctx.mode == "mean":
            gradients = gradients / lengths.clamp(min=1).unsqueeze(1)
        if weights is None:
            scatter_add(of_rows, places, gradients, picked=bags)
        else:
            of_uses = gradients.index_select(0, bags)
            if ctx.needs_input_grad[4]:
                of_weights = (rows.index_select(0, places) * of_uses).sum(1)
            scatter_add(of_rows, places, of_uses * weights.unsqueeze(1))
        return of_rows, None, None, None, of_weights


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *places: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*places)
        ctx.shape = rows.shape
        return tuple(rows.index_select(0, part) for part in places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_rows = torch.zeros(ctx.shape)
        for places, part in zip(ctx.saved_tensors, gradients):
            scatter_add(of_rows, places, part.contiguous())
        return of_rows, *[None] * len(gradients)


_pool: Callable[[Tensor, Tensor, Tensor, str, Tensor | None], Tensor] = _Pool.apply
_spread: Callable[..., tuple[Tensor, ...]] = _Spread.apply

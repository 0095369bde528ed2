"""Rows brought to the place of use, row by row or pooled.

Gradients of a row are summed in the order of the row's uses, with any number of threads. Torch's
own operations promise no order, and take up to ten times as long.

Rows, results and gradients lie on one device. Places, lengths and weights lie on the CPU, and are
moved when needed.

Legend: U rows of D floats, n places among the rows, B bags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from ecrm.device.copies import on_device, on_host
from ecrm.kernels.bag_sum import bag_sum
from ecrm.kernels.scatter_add import scatter_add
from ecrm.kernels.segment_sum import segment_sum
from ecrm.kernels.unit_order import Uses
from ecrm.ops import Memory, no_memory, unshared
from ecrm.protection.routing import FoundRows
from ecrm.protection.wire_dtype import round_to


class BagGradients(NamedTuple):
    """Gradients of bags, and the bag of each use of the rows, on the CPU.

    Args:
        uses: The uses of the U rows, n in all.
        values: float32 [R, D]; bag b is row `numbers[b]`.
        numbers: int64 [B].
        bags: int64 [n], the row of `values` for each use.
        whole: The tensor given by autograd, with the memory of `values`. While it is referenced
            here, autograd gives it to no parameter.
        weights: float32 [n], the factor of each use, or `None`.
    """

    uses: Uses
    values: Tensor
    numbers: Tensor
    bags: Tensor
    whole: Tensor
    weights: Tensor | None = None

    def sum_into(
        self, out: Tensor, divisor: float = 1.0, rounded_to: torch.dtype = torch.float32
    ) -> bool:
        """Sum by row, float32 [U, D], divided and rounded; returns whether results are finite."""
        return segment_sum(
            out, self.uses, self.values, self.bags, divisor, self.weights, rounded_to
        )

    def in_order(self) -> Tensor:
        """A copy of the gradients of the bags, float32 [B, D]."""
        return self.values.index_select(0, self.numbers)


Later = Callable[[BagGradients], bool]
"""Takes gradients of bags for later; `False`: their sums are wanted at once."""


def _at_once(gradients: BagGradients) -> bool:
    """A `Later` that takes none."""
    return False


def pool(
    rows: Tensor,
    places: Tensor,
    lengths: Tensor,
    mode: str,
    weights: Tensor | None = None,
    features: int = 1,
    memory: Memory = no_memory,
    uses: Uses | None = None,
    later: Later = _at_once,
    found: FoundRows | None = None,
    rounded_to: torch.dtype = torch.float32,
) -> Tensor:
    """Sums or means of bags of rows, float32 [B, D]; an empty bag gives zeros.

    `rows` is float32 [U, D]; `places`, int64 [n], gives the row of each use. Bag after bag,
    `lengths`, int64 [B], gives the number of uses in a bag. `mode` is `sum` or `mean`. If
    `weights`, float32 [n], is given, rows are multiplied by the weights, and `mode` must be `sum`.

    The bags of several `features` follow each other, B / features for each feature. The bags of a
    sample then come out side by side: float32 [B / features, features * D].

    Backward takes the memory for the gradients of the rows from `memory`. `uses` are the uses of
    the rows in `places`, if known. Backward then offers the gradients of the bags to `later`, and
    gives none to autograd if `later` takes the gradients.

    `found`, for bags that `reads_in_place`, tells where the values of `rows` lie. For sums without
    weights, `found` may also tell sums of bags. Then `rows` may hold anything: only the gradients
    of `rows` count.

    `rounded_to` is float32 or bfloat16. Bags are rounded, and backward rounds the gradients of
    bags, as by casts to that dtype and back. `rows` are rounded already, and `found` on the way.
    """
    return _pool(
        rows, places, lengths, mode, weights, features, memory, uses, later, found, rounded_to
    )


def reads_in_place(rows: Tensor, mode: str, weights: Tensor | None) -> bool:
    """Whether `pool` reads rows like `rows` where the rows lie.

    Rows on a GPU are copied first, and rows whose values backward needs, for gradients of weights.
    """
    if not rows.is_cpu or rows.dtype != torch.float32:
        return False
    if weights is None:
        return True
    return (
        mode == "sum"
        and weights.is_cpu
        and weights.dtype == torch.float32
        and not weights.requires_grad
    )


def spread(
    rows: Tensor, places: Sequence[Tensor], memory: Memory = no_memory
) -> tuple[Tensor, ...]:
    """Copies of rows, [U, D]: a tensor [n, D] for each of the `places`, int64 [n].

    Backward takes the memory for the gradients of the rows from `memory`.
    """
    return _spread(rows, memory, *places)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        places: Tensor,
        lengths: Tensor,
        mode: str,
        weights: Tensor | None,
        features: int,
        memory: Memory,
        uses: Uses | None,
        later: Later,
        found: FoundRows | None,
        rounded_to: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(rows, places, lengths, weights)
        ctx.mode, ctx.features, ctx.memory = mode, features, memory
        ctx.uses, ctx.later = uses if rows.is_cpu else None, later
        ctx.rounded_to = rounded_to
        if not ctx.needs_input_grad[4] and reads_in_place(rows, mode, weights):
            if found is not None and found.summed:
                return _with_sums(found, places, lengths, features)
            lie = rows.detach() if found is None else found
            factors = None if weights is None else weights.contiguous()
            return bag_sum(lie, places, lengths, features, mode == "mean", factors, rounded_to)
        assert found is None
        if features > 1:
            order = _by_sample(torch.arange(lengths.numel(), dtype=torch.int32), features)
            lengths, places, weights = torch.ops.fbgemm.permute_1D_sparse_data(
                order, lengths, places, weights, places.numel()
            )
        ends = on_device(rows.device, torch.ops.fbgemm.asynchronous_complete_cumsum(lengths))
        weights = None if weights is None else on_device(rows.device, weights)
        bags: Tensor = embedding_bag(
            on_device(rows.device, places),
            rows,
            ends,
            mode=mode,
            per_sample_weights=weights,
            include_last_offset=True,
        )
        return round_to(bags, rounded_to).view(-1, features * rows.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, places, lengths, weights = ctx.saved_tensors
        of_weights, whole = None, gradients
        if ctx.rounded_to != torch.float32:
            gradients = gradients.to(ctx.rounded_to).to(gradients.dtype)
        gradients, numbers = _of_bags(gradients, ctx.features, rows.shape[1])
        one_each = bool((lengths == 1).all())
        bags = numbers if one_each else torch.repeat_interleave(numbers, lengths)
        places, bags = on_device(rows.device, places), on_device(rows.device, bags)
        if ctx.mode == "mean":
            counts = torch.ones(len(gradients), dtype=lengths.dtype)
            counts[numbers] = lengths.clamp(min=1)
            gradients = gradients / on_device(rows.device, counts.unsqueeze(1))
        if ctx.uses is not None and not ctx.needs_input_grad[4]:
            factors = None if weights is None else weights.contiguous()
            of_bags = BagGradients(ctx.uses, gradients, numbers, bags, whole, factors)
            if ctx.later(of_bags):
                return (None,) * 11
            sums = unshared(ctx.memory)
            of_rows = torch.empty(rows.shape) if sums is None else sums
            of_bags.sum_into(of_rows)
        elif weights is None:
            of_rows = _summed(rows, [(places, gradients, bags)], ctx.memory)
        else:
            of_uses = gradients.index_select(0, bags)
            if ctx.needs_input_grad[4]:
                (of_weights,) = on_host((rows.index_select(0, places) * of_uses).sum(1))
            weighted = of_uses * on_device(rows.device, weights.unsqueeze(1))
            of_rows = _summed(rows, [(places, weighted, None)], ctx.memory)
        return of_rows, None, None, None, of_weights, *[None] * 6


def _with_sums(found: FoundRows, places: Tensor, lengths: Tensor, features: int) -> Tensor:
    """As `bag_sum`, with some bags summed by shards."""
    left = torch.ones(lengths.numel(), dtype=torch.bool)
    for summed in found.summed:
        left[summed.bags] = False
    kept = places[left.repeat_interleave(lengths)]
    lengths_kept = torch.where(left, lengths, 0)
    out = bag_sum(found, kept, lengths_kept, features, rounded_to=found.rounded_to)
    samples, rows = lengths.numel() // features, out.view(lengths.numel(), -1)
    for summed in found.summed:
        rows[summed.bags % samples * features + summed.bags // samples] = summed.values
    return out


def _of_bags(gradients: Tensor, features: int, dim: int) -> tuple[Tensor, Tensor]:
    """Gradients of bags as rows of a matrix, [R, D], and the row of each bag, int64 [B].

    `gradients`, [B / features, features * D], have one row per sample. If the rows are parts of
    wider rows, as left by torch.cat, the matrix spans the wider rows, and nothing is copied.
    """
    samples, stride = gradients.shape[0], gradients.stride(0)
    if samples < 2 or gradients.stride(1) != 1 or stride % dim or stride < features * dim:
        gradients, stride = gradients.contiguous(), features * dim
    step = stride // dim
    matrix = gradients.as_strided(
        ((samples - 1) * step + features if samples else 0, dim), (dim, 1)
    )
    numbers = torch.arange(samples) * step + torch.arange(features).unsqueeze(1)
    return matrix, numbers.view(-1)


def _by_sample(of_bags: Tensor, features: int) -> Tensor:
    """The entries of [B] sorted sample by sample, and no longer feature by feature."""
    return of_bags.view(features, -1).t().reshape(-1)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, memory: Memory, *places: Tensor) -> tuple[Tensor, ...]:
        places = tuple(on_device(rows.device, part) for part in places)
        ctx.save_for_backward(rows, *places)
        ctx.memory = memory
        return tuple(rows.index_select(0, part) for part in places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, *places = ctx.saved_tensors
        uses = [(of_part, part.contiguous(), None) for of_part, part in zip(places, gradients)]
        return _summed(rows, uses, ctx.memory), None, *[None] * len(gradients)


def _summed(
    rows: Tensor, uses: Iterable[tuple[Tensor, Tensor, Tensor | None]], memory: Memory
) -> Tensor:
    """Sums of rows, like `rows`, [U, D]; `uses` are (places, values, picked) for `scatter_add`."""
    sums = unshared(memory)
    if sums is None:
        sums = torch.empty(rows.shape, device=rows.device)
    seen = torch.zeros(len(rows), dtype=torch.uint8, device=rows.device)
    for places, values, picked in uses:
        scatter_add(sums, places, values, picked=picked, seen=seen)
    unused = seen == 0
    if rows.is_cuda:  # without waiting for the GPU
        sums.masked_fill_(unused.unsqueeze(1), 0.0)
    elif unused.any():
        sums[unused] = 0
    return sums


_pool: Callable[..., Tensor] = _Pool.apply
_spread: Callable[..., tuple[Tensor, ...]] = _Spread.apply

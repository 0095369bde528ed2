"""The GPU kernels: blocks of pairs of a sample forward, all rows of a sample backward.

Every product is rounded before the addition, in README.md's order. Gradients of a sample's rows are
written row by row. `scatter_add` then sums the gradients in order.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ecrm.kernels.scatter_add.triton import add
from ecrm.kernels.triton_rows import columns, kernel, vector_of

_PAIRS = 64  # of a program
_ELEMENTS = 2048  # of a program


@kernel
def _forward(
    out,
    out_stride: tl.int64,
    dense,
    dense_stride: tl.int64,
    values,
    values_stride: tl.int64,
    places,
    pairs,
    FEATURES: tl.constexpr,
    DIMENSION: tl.constexpr,
    VECTOR: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Forward pass. `pairs`, int32 [2, pairs], has the first and the second row of every pair."""
    ALL: tl.constexpr = FEATURES * (FEATURES + 1) // 2
    sample = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    there = pair < ALL
    dense += sample * dense_stride * VECTOR
    places += sample * FEATURES
    first = tl.load(pairs + pair, mask=there, other=0)
    second = tl.load(pairs + ALL + pair, mask=there, other=0)
    left = _row(dense, values, values_stride, places, first, there, VECTOR)
    right = _row(dense, values, values_stride, places, second, there, VECTOR)
    sums = tl.zeros((PAIRS, 16), tl.float32)
    for d in range(0, DIMENSION, 16):
        column = d + tl.arange(0, 16)
        mask = there[:, None] & (column < DIMENSION)[None, :]
        x = tl.load(_columns(left, column, VECTOR), mask=mask, other=0.0)
        y = tl.load(_columns(right, column, VECTOR), mask=mask, other=0.0)
        sums += x * y
    # An addition of two operands has no other order.
    eight = tl.sum(tl.reshape(sums, (PAIRS, 2, 8)), axis=1)
    four = tl.sum(tl.reshape(eight, (PAIRS, 2, 4)), axis=1)
    two = tl.sum(tl.reshape(four, (PAIRS, 2, 2)), axis=1)
    out += sample * out_stride
    tl.store(out + DIMENSION + pair, tl.sum(two, axis=1), mask=there)
    if tl.program_id(1) == 0:
        column = tl.arange(0, BLOCK)
        mask = column < DIMENSION
        tl.store(out + column, tl.load(dense + column, mask=mask, other=0.0), mask=mask)


@triton.jit
def _row(dense, values, values_stride, places, number, mask, VECTOR: tl.constexpr):
    """Pointers to rows of a sample: row 0 is `dense`, row n is at place n - 1 of `places`."""
    place = tl.load(places + number - 1, mask=mask & (number > 0), other=0)
    return tl.where(number == 0, dense, values + place * values_stride * VECTOR)


@triton.jit
def _columns(row, column, VECTOR: tl.constexpr):
    return tl.multiple_of(row[:, None] + column[None, :], [4, 4 * VECTOR])


@kernel
def _backward(
    of_dense,
    of_rows,
    gradients,
    gradients_stride: tl.int64,
    dense,
    dense_stride: tl.int64,
    values,
    values_stride: tl.int64,
    places,
    FEATURES: tl.constexpr,
    DIMENSION: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    COUNT: tl.constexpr = FEATURES + 1
    PER_ROW: tl.constexpr = DIMENSION // VECTOR
    sample = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wanted = column < DIMENSION
    gradients += sample * gradients_stride
    dense += sample * dense_stride * VECTOR
    places += sample * FEATURES
    is_dense = (i == 0)[:, None]
    total = tl.load(gradients + column, mask=wanted, other=0.0)[None, :]
    total = tl.where(is_dense, total, 0.0)
    for j in range(COUNT):
        low, high = tl.minimum(i, j), tl.maximum(i, j)
        pair = low * (2 * COUNT - 1 - low) // 2 + high - low - 1
        adds = (i != j) & (i < COUNT)
        factor = tl.load(gradients + DIMENSION + pair, mask=adds, other=0.0)
        place = tl.load(places + j - 1, mask=j > 0, other=0)
        row = tl.where(j == 0, dense, values + place * values_stride * VECTOR)
        value = tl.load(tl.multiple_of(row + column, [4 * VECTOR]), mask=wanted, other=0.0)
        total = tl.where(adds[:, None], total + factor[:, None] * value[None, :], total)
    here = wanted[None, :]
    target = columns(of_dense, sample + i * 0, PER_ROW, column, VECTOR)
    tl.store(target, total, mask=is_dense & here)
    others = ((i > 0) & (i < COUNT))[:, None]
    target = columns(of_rows, sample * FEATURES + i - 1, PER_ROW, column, VECTOR)
    tl.store(target, total, mask=others & here)


def forward(dense: Tensor, values: Tensor, places: Tensor, features: int) -> Tensor:
    batch, dimension = dense.shape
    pairs = features * (features + 1) // 2
    out = torch.empty(batch, dimension + pairs, device=dense.device)
    vector = vector_of(dense, values)
    _forward[(batch, max(1, triton.cdiv(pairs, _PAIRS)))](
        out,
        out.stride(0),
        dense,
        dense.stride(0) // vector,
        values,
        values.stride(0) // vector,
        places,
        _pairs(features, dense.device),
        FEATURES=features,
        DIMENSION=dimension,
        VECTOR=vector,
        PAIRS=_PAIRS,
        BLOCK=triton.next_power_of_2(dimension),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def backward(
    gradients: Tensor,
    dense: Tensor,
    values: Tensor,
    places: Tensor,
    features: int,
    sums: Tensor,
) -> Tensor:
    """Return the gradients of `dense`, and write the gradients of `values` to `sums`."""
    batch, dimension = dense.shape
    of_dense = torch.empty(batch, dimension, device=dense.device)
    of_rows = torch.empty(batch * features, dimension, device=dense.device)
    vector = vector_of(dense, values, of_dense, of_rows)
    rows = triton.next_power_of_2(features + 1)
    # at least 2: Triton ends the process over a gather from rows of one element
    block = min(max(16, _ELEMENTS // rows), max(2, triton.next_power_of_2(dimension)))
    _backward[(batch, triton.cdiv(dimension, block))](
        of_dense,
        of_rows,
        gradients,
        gradients.stride(0),
        dense,
        dense.stride(0) // vector,
        values,
        values.stride(0) // vector,
        places,
        FEATURES=features,
        DIMENSION=dimension,
        VECTOR=vector,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
    )
    sums.zero_()
    if features:
        add(sums, places, of_rows, seen=None, picked=None, unique=False)
    return of_dense


@cache
def _pairs(features: int, device: torch.device) -> Tensor:
    """The numbers of the two rows of every pair, int32 [2, pairs]."""
    return torch.triu_indices(
        features + 1, features + 1, offset=1, dtype=torch.int32, device=device
    )

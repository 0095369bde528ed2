"""The GPU kernel: one warp makes all additions to a row, in order.

A stable sort comes first, unless indices are unique. The warp with a row's first index adds all
values of the row. Atomic additions of floats would have no fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ecrm.kernels.triton_rows import ELEMENTS, columns, kernel, vector_of


@kernel
def _add(
    out,
    out_stride: tl.int64,
    index,
    order,
    values,
    values_stride: tl.int64,
    picked,
    seen,
    n: tl.int64,
    UNIQUE: tl.constexpr,
    PICKED: tl.constexpr,
    SEEN: tl.constexpr,
    DIMENSION: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Add. `index` is unique or sorted; `order` has the places of the indices before the sort."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = i < n
    row = tl.load(index + i, mask=present, other=-1)
    if not UNIQUE:
        present = present & (row != tl.load(index + i - 1, mask=present & (i > 0), other=-1))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wanted = (column < DIMENSION)[None, :]
    mask = present[:, None] & wanted
    place = columns(out, row, out_stride, column, VECTOR)
    known = present
    if SEEN:
        known = tl.load(seen + row, mask=present, other=0) != 0
    total = tl.load(place, mask=mask & known[:, None], other=0.0)
    if UNIQUE:
        source = i
        if PICKED:
            source = tl.load(picked + i, mask=present, other=0)
        total += tl.load(
            columns(values, source, values_stride, column, VECTOR), mask=mask, other=0.0
        )
    else:
        more = present
        while tl.max(more.to(tl.int32), axis=0) > 0:
            for _ in tl.static_range(AT_ONCE):  # unrolled: the values are loaded together
                more = present & (i < n)
                more = more & (tl.load(index + i, mask=more, other=-1) == row)
                source = tl.load(order + i, mask=more, other=0)
                if PICKED:
                    source = tl.load(picked + source, mask=more, other=0)
                adds = more[:, None] & wanted
                value = tl.load(
                    columns(values, source, values_stride, column, VECTOR), mask=adds, other=0.0
                )
                total = tl.where(adds, total + value, total)
                i += 1
    tl.store(place, total, mask=mask)
    if WIDTH > DIMENSION:  # noqa: SIM102 - a constant
        if tl.program_id(1) == 0:
            rest = DIMENSION + tl.arange(0, REST)
            fresh = (present & (known == 0))[:, None] & (rest < WIDTH)[None, :]
            beyond = out + (row * out_stride * VECTOR)[:, None] + rest[None, :]
            tl.store(beyond, tl.zeros((ROWS, REST), tl.float32), mask=fresh)


def add(
    out: Tensor,
    index: Tensor,
    values: Tensor,
    seen: Tensor | None,
    picked: Tensor | None,
    unique: bool,
) -> None:
    dimension = values.shape[1]
    width = dimension if seen is None else out.shape[1]
    order = index
    if not unique:
        index, order = torch.sort(index, stable=True)
    vector = vector_of(values, out[:, :dimension])
    # at least 8: Triton 3.6 ends the process over a loop with a row for every thread of a warp
    block = min(512, max(8, triton.next_power_of_2(dimension)))
    # repeated rows: one warp adds a row, load after load; unique rows: as many loads as possible
    elements, warps = (ELEMENTS, 4) if unique else (128, 1)
    at_a_time = max(1, elements // block)
    _add[(triton.cdiv(len(index), at_a_time), triton.cdiv(dimension, block))](
        out,
        out.stride(0) // vector,
        index,
        order,
        values,
        values.stride(0) // vector,
        index if picked is None else picked,
        index if seen is None else seen,
        len(index),
        UNIQUE=unique,
        PICKED=picked is not None,
        SEEN=seen is not None,
        DIMENSION=dimension,
        WIDTH=width,
        VECTOR=vector,
        ROWS=at_a_time,
        BLOCK=block,
        REST=triton.next_power_of_2(max(width - dimension, 1)),
        AT_ONCE=8,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    if seen is not None:
        seen.index_fill_(0, index, 1)

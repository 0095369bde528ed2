"""The GPU kernels: operations in README.md's order, and old XOR new bits in the same pass.

Division and roots are correctly rounded. Multiply-adds are fused only as in the definition. So all
backends give the same bits. A program writes to memory only after all reads of the same memory, so
the delta may lie over the gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ecrm.kernels.triton_rows import (
    ELEMENTS,
    columns,
    kernel,
    pieces,
    programs,
    row_and_piece,
    vector_of,
)

if TYPE_CHECKING:
    from ecrm.kernels.sparse_update import Hyper


@kernel
def _update_elements(
    weights,
    weights_stride: tl.int64,
    state0,
    state0_stride: tl.int64,
    state1,
    state1_stride: tl.int64,
    rows,
    gradients,
    gradients_stride: tl.int64,
    weights_change,
    weights_change_stride: tl.int64,
    state0_change,
    state0_change_stride: tl.int64,
    state1_change,
    state1_change_stride: tl.int64,
    marks,
    marks_stride: tl.int64,
    mark_change,
    mark_change_stride: tl.int64,
    n: tl.int64,
    lr: tl.float32,
    eps: tl.float32,
    beta1: tl.float32,
    beta2: tl.float32,
    one_minus_beta1: tl.float32,
    one_minus_beta2: tl.float32,
    correction1: tl.float32,
    correction2: tl.float32,
    l2: tl.float32,
    keep: tl.float32,
    OPTIMIZER: tl.constexpr,
    WITH_L2: tl.constexpr,
    WITH_DELTA: tl.constexpr,
    WITH_MARKS: tl.constexpr,
    PER_ROW: tl.constexpr,
    VECTOR: tl.constexpr,
    COUNT: tl.constexpr,
):
    """SGD, Adagrad and Adam: every element is independent."""
    i, piece = row_and_piece(PER_ROW, COUNT)
    inside = i < n
    row = tl.load(rows + i, mask=inside, other=0)
    mask = inside[:, None]
    if WITH_MARKS:  # loaded with the row's elements, before the first store
        began = tl.load(marks + row * marks_stride, mask=inside, other=1.0) == 0
    zero = tl.zeros((COUNT, VECTOR), tl.float32)
    g = tl.load(pieces(gradients, i, gradients_stride, piece, VECTOR), mask=mask, other=0.0)
    place = pieces(weights, row, weights_stride, piece, VECTOR)
    old = tl.load(place, mask=mask, other=0.0)
    w = old.to(tl.float32)
    if WITH_L2:
        g += w * l2
    w *= keep
    if OPTIMIZER == "sgd":
        new = tl.fma(zero - lr, g, w)
    else:
        place0 = pieces(state0, row, state0_stride, piece, VECTOR)
        change0 = pieces(state0_change, i, state0_change_stride, piece, VECTOR)
        old0 = tl.load(place0, mask=mask, other=0.0)
        if OPTIMIZER == "adagrad":
            new0 = tl.fma(g, g, old0)
            root = tl.sqrt(new0.to(tl.float64)) + eps
            new = (w.to(tl.float64) - (g * lr).to(tl.float64) / root).to(tl.float32)
        else:
            place1 = pieces(state1, row, state1_stride, piece, VECTOR)
            change1 = pieces(state1_change, i, state1_change_stride, piece, VECTOR)
            old1 = tl.load(place1, mask=mask, other=0.0)
            new0 = old0 * beta1 + g * one_minus_beta1
            new1 = old1 * beta2 + (g * g) * one_minus_beta2
            root = tl.sqrt_rn(tl.div_rn(new1, zero + correction2)) + eps
            new = w - tl.div_rn(tl.div_rn(new0, zero + correction1), root) * lr
            _replace(place1, old1, new1, change1, mask, WITH_DELTA)
        _replace(place0, old0, new0, change0, mask, WITH_DELTA)
    new = _as_weights(new, old)
    if WITH_MARKS:
        change_of_mark = mark_change + i * mark_change_stride
        tl.store(change_of_mark, tl.where(began, 0x3F800000, 0), mask=inside & (piece == 0))
        old = tl.where(began[:, None], tl.zeros_like(old), old)
    change = pieces(weights_change, i, weights_change_stride, piece, VECTOR)
    _replace(place, old, new, change, mask, WITH_DELTA)


@kernel
def _update_rows(
    weights,
    weights_stride: tl.int64,
    state,
    state_stride: tl.int64,
    rows,
    gradients,
    gradients_stride: tl.int64,
    weights_change,
    weights_change_stride: tl.int64,
    state_change,
    state_change_stride: tl.int64,
    marks,
    marks_stride: tl.int64,
    mark_change,
    mark_change_stride: tl.int64,
    n: tl.int64,
    lr: tl.float32,
    eps: tl.float32,
    l2: tl.float32,
    keep: tl.float32,
    WITH_L2: tl.constexpr,
    WITH_DELTA: tl.constexpr,
    WITH_MARKS: tl.constexpr,
    DIMENSION: tl.constexpr,
    UNROLLED: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row-wise Adagrad on whole rows: the squares of a row's gradient are summed first."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = i < n
    row = tl.load(rows + i, mask=present, other=0)
    column = tl.arange(0, BLOCK)
    mask = present[:, None] & (column < DIMENSION)[None, :]
    place = columns(weights, row, weights_stride, column, VECTOR)
    old = tl.load(place, mask=mask, other=0.0)  # loaded before the sum of squares
    old_h = tl.load(state + row * state_stride, mask=present, other=0.0)
    partial = tl.zeros((ROWS, 8), tl.float32)
    if UNROLLED:
        for d in tl.static_range(0, DIMENSION, 8):
            partial += _squares(
                weights, row, weights_stride, gradients, i, gradients_stride, present, d, l2,
                WITH_L2, DIMENSION, VECTOR,
            )  # fmt: skip
    else:
        for d in range(0, DIMENSION, 8):
            partial += _squares(
                weights, row, weights_stride, gradients, i, gradients_stride, present, d, l2,
                WITH_L2, DIMENSION, VECTOR,
            )  # fmt: skip
    # in the first-level cache by now
    g = tl.load(columns(gradients, i, gradients_stride, column, VECTOR), mask=mask, other=0.0)
    # Threads read memory written by other threads: the state, and gradients below the delta.
    tl.debug_barrier()
    mean = tl.div_rn(_sum_of_eight(partial, ROWS), tl.zeros((ROWS,), tl.float32) + DIMENSION)
    h = old_h + mean
    row_step = tl.div_rn(tl.zeros((ROWS,), tl.float32) + lr, tl.sqrt_rn(h) + eps)
    w = old.to(tl.float32)
    if WITH_L2:
        g += w * l2
    new = _as_weights(w * keep - g * row_step[:, None], old)
    if WITH_MARKS:
        began = tl.load(marks + row * marks_stride, mask=present, other=1.0) == 0
        change_of_mark = mark_change + i * mark_change_stride
        tl.store(change_of_mark, tl.where(began, 0x3F800000, 0), mask=present)
        old = tl.where(began[:, None], tl.zeros_like(old), old)
    change = columns(weights_change, i, weights_change_stride, column, VECTOR)
    _replace(place, old, new, change, mask, WITH_DELTA)
    change_of_state = state_change + i * state_change_stride
    _replace(state + row * state_stride, old_h, h, change_of_state, present, WITH_DELTA)


@triton.jit
def _squares(
    weights,
    row,
    weights_stride,
    gradients,
    i,
    gradients_stride,
    present,
    d,
    l2,
    WITH_L2: tl.constexpr,
    DIMENSION: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Squares of the gradients in eight columns from d on, [rows, 8]."""
    column = d + tl.arange(0, 8)
    mask = present[:, None] & (column < DIMENSION)[None, :]
    g = tl.load(columns(gradients, i, gradients_stride, column, VECTOR), mask=mask, other=0.0)
    if WITH_L2:
        place = columns(weights, row, weights_stride, column, VECTOR)
        g += tl.load(place, mask=mask, other=0.0).to(tl.float32) * l2
    return g * g


@triton.jit
def _sum_of_eight(partial, ROWS: tl.constexpr):
    """Sum pairs, then pairs of pairs, then the last two sums.

    An addition of two operands has no other order.
    """
    fours = tl.sum(tl.reshape(partial, (ROWS, 4, 2)), axis=2)
    pairs = tl.sum(tl.reshape(fours, (ROWS, 2, 2)), axis=2)
    return tl.sum(pairs, axis=1)


@triton.jit
def _as_weights(value, old):
    """float32 rounded to the type of the old weights, to nearest and ties to even.

    bfloat16 is rounded by hand, because Triton's interpreter truncates.
    """
    if old.dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = (
            tl.where(value != value, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        )
    else:
        result = value.to(old.dtype)
    return result


@triton.jit
def _replace(place, old, new, change, mask, WITH_DELTA: tl.constexpr):
    """Write new values; `change` receives old XOR new bits."""
    tl.store(place, new, mask=mask)
    if WITH_DELTA:
        WORD: tl.constexpr = change.dtype.element_ty
        bits = old.to(WORD, bitcast=True) ^ new.to(WORD, bitcast=True)
        tl.store(change, bits, mask=mask)


def update(
    weights: Tensor,
    states: list[Tensor],
    rows: Tensor,
    gradients: Tensor,
    optimizer: str,
    hyper: Hyper,
    delta: Tensor | None,
    marks: Tensor | None,
) -> None:
    parts = [weights, *states]
    marked: list[Any] = [rows, 0, rows, 0]
    changes = parts if delta is None else _change_views(parts, delta)
    changes_of_marks: list[Tensor] = []
    if marks is not None and delta is not None:
        changes_of_marks = _change_views([marks[:, None]], delta[:, -4:])
        change = changes_of_marks[0]
        marked = [marks, marks.stride(0), change, change.stride(0)]
    told = {"WITH_DELTA": delta is not None, "WITH_MARKS": bool(changes_of_marks)}
    if optimizer == "rowwise_adagrad":
        _run_rows(parts, rows, gradients, hyper, changes, marked, told)
    else:
        _run_elements(parts, rows, gradients, optimizer, hyper, changes, marked, told)
    if delta is not None:
        _copy_back(changes, delta)
        _copy_back(changes_of_marks, delta[:, -4:])
    if marks is not None:
        marks.index_fill_(0, rows, 1.0)


def _run_elements(
    parts: list[Tensor],
    rows: Tensor,
    gradients: Tensor,
    optimizer: str,
    hyper: Hyper,
    changes: list[Tensor],
    marked: list[Any],
    told: dict[str, bool],
) -> None:
    n, dimension = gradients.shape
    vector = vector_of(gradients, *parts, *changes)
    per_row = dimension // vector

    def strided(matrices: list[Tensor]) -> list[Any]:
        three = (matrices + matrices[:1] * 2)[:3]
        return [number for m in three for number in (m, m.stride(0) // vector)]

    # half as many if doubles or two states take registers
    elements = ELEMENTS if optimizer == "sgd" else ELEMENTS // 2
    _update_elements[programs(n, per_row, vector, elements)](
        *strided(parts),
        rows,
        gradients,
        gradients.stride(0) // vector,
        *strided(changes),
        *marked,
        n,
        hyper.learning_rate,
        hyper.eps,
        hyper.beta1,
        hyper.beta2,
        hyper.one_minus_beta1,
        hyper.one_minus_beta2,
        hyper.correction1,
        hyper.correction2,
        hyper.l2,
        hyper.keep,
        OPTIMIZER=optimizer,
        WITH_L2=hyper.l2 != 0,
        **told,
        PER_ROW=per_row,
        VECTOR=vector,
        COUNT=elements // vector,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _run_rows(
    parts: list[Tensor],
    rows: Tensor,
    gradients: Tensor,
    hyper: Hyper,
    changes: list[Tensor],
    marked: list[Any],
    told: dict[str, bool],
) -> None:
    n, dimension = gradients.shape
    (weights, state), (weights_change, state_change) = parts, changes
    vector = vector_of(gradients, weights, weights_change)
    block = max(8, triton.next_power_of_2(dimension))
    at_a_time = min(128, max(1, ELEMENTS // block))
    _update_rows[(triton.cdiv(n, at_a_time),)](
        weights,
        weights.stride(0) // vector,
        state,
        state.stride(0),
        rows,
        gradients,
        gradients.stride(0) // vector,
        weights_change,
        weights_change.stride(0) // vector,
        state_change,
        state_change.stride(0),
        *marked,
        n,
        hyper.learning_rate,
        hyper.eps,
        hyper.l2,
        hyper.keep,
        WITH_L2=hyper.l2 != 0,
        **told,
        DIMENSION=dimension,
        UNROLLED=dimension <= 512,
        VECTOR=vector,
        ROWS=at_a_time,
        BLOCK=block,
        num_warps=4 if block <= 4096 else 16,
        enable_fp_fusion=False,
    )


def _change_views(parts: list[Tensor], delta: Tensor) -> list[Tensor]:
    """Views of `delta`'s memory for all parts, as integers of the parts' element sizes.

    A part without an aligned place in `delta` gets new memory.
    """
    views, at = [], 0
    for part in parts:
        width = part.shape[1] * part.element_size()
        piece = delta[:, at : at + width]
        word = torch.int32 if part.element_size() == 4 else torch.int16
        numbers = piece.data_ptr(), piece.storage_offset(), piece.stride(0)
        fits = all(number % word.itemsize == 0 for number in numbers)
        shape = len(piece), part.shape[1]
        views.append(
            piece.view(word) if fits else torch.empty(shape, dtype=word, device=delta.device)
        )
        at += width
    return views


def _copy_back(changes: list[Tensor], delta: Tensor) -> None:
    at = 0
    for change in changes:
        width = change.shape[1] * change.element_size()
        if change.data_ptr() != delta.data_ptr() + at:
            delta[:, at : at + width] = change.contiguous().view(torch.uint8)
        at += width

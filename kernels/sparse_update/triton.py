"""The GPU kernel: eight columns of several rows at a time, operations in README.md's order.

Division and roots are the correctly rounded ones, and multiply-adds are fused only where the
definition fuses them, so that the bits are those of every other backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from ecrm.kernels.sparse_update import Hyper

_ROWS_PER_PROGRAM = 16


@triton.jit
def _sum_of_eight(partial, ROWS: tl.constexpr):
    """Sum pairs, then pairs of pairs, then both.

    Each addition has two operands, so its order cannot vary.
    """
    fours = tl.sum(tl.reshape(partial, (ROWS, 4, 2)), axis=2)
    pairs = tl.sum(tl.reshape(fours, (ROWS, 2, 2)), axis=2)
    return tl.sum(pairs, axis=1)


@triton.jit
def _as_weights(value, weights):
    """float32 rounded to the weights' type, to nearest and ties to even.

    bfloat16 is rounded by hand, because Triton's interpreter truncates it.
    """
    if weights.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = (
            tl.where(value != value, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        )
    else:
        result = value.to(weights.dtype.element_ty)
    return result


@triton.jit
def _replace(place, value, change, mask, WITH_DELTA: tl.constexpr):
    """Write a value; `change` receives old XOR new bits."""
    if WITH_DELTA:
        old = tl.load(place, mask=mask, other=0).to(change.dtype.element_ty, bitcast=True)
        tl.store(change, old ^ value.to(change.dtype.element_ty, bitcast=True), mask=mask)
    tl.store(place, value, mask=mask)


@triton.jit
def _update(
    weights,
    weights_stride,
    state0,
    state0_stride,
    state1,
    state1_stride,
    rows,
    gradients,
    gradient_stride,
    weights_change,
    weights_change_stride,
    state0_change,
    state0_change_stride,
    state1_change,
    state1_change_stride,
    n,
    dimension,
    lr,
    eps,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    correction1,
    correction2,
    l2,
    keep,
    OPTIMIZER: tl.constexpr,
    WITH_L2: tl.constexpr,
    WITH_DELTA: tl.constexpr,
    ROWS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = i < n
    row = tl.load(rows + i, mask=present, other=0)
    columns = tl.arange(0, 8)
    zero = tl.zeros((ROWS, 8), tl.float32)

    if OPTIMIZER == "rowwise_adagrad":
        partial = zero
        for d in range(0, dimension, 8):
            mask = present[:, None] & (d + columns < dimension)[None, :]
            g = tl.load(
                gradients + i[:, None] * gradient_stride + (d + columns)[None, :],
                mask=mask,
                other=0.0,
            )
            if WITH_L2:
                old = weights + row[:, None] * weights_stride + (d + columns)[None, :]
                g += tl.load(old, mask=mask, other=0.0).to(tl.float32) * l2
            partial += g * g
        mean = tl.div_rn(_sum_of_eight(partial, ROWS), tl.zeros((ROWS,), tl.float32) + dimension)
        h = tl.load(state0 + row * state0_stride, mask=present, other=0.0) + mean
        row_step = tl.div_rn(tl.zeros((ROWS,), tl.float32) + lr, tl.sqrt_rn(h) + eps)
        _replace(
            state0 + row * state0_stride,
            h,
            state0_change + i * state0_change_stride,
            present,
            WITH_DELTA,
        )

    for d in range(0, dimension, 8):
        column = (d + columns)[None, :]
        mask = present[:, None] & (column < dimension)
        g = tl.load(gradients + i[:, None] * gradient_stride + column, mask=mask, other=0.0)
        place = weights + row[:, None] * weights_stride + column
        w = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        if WITH_L2:
            g += w * l2
        w *= keep
        if OPTIMIZER == "sgd":
            new = tl.fma(zero - lr, g, w)
        elif OPTIMIZER == "rowwise_adagrad":
            new = w - g * row_step[:, None]
        elif OPTIMIZER == "adagrad":
            place0 = state0 + row[:, None] * state0_stride + column
            h = tl.fma(g, g, tl.load(place0, mask=mask, other=0.0))
            root = tl.sqrt(h.to(tl.float64)) + eps
            new = (w.to(tl.float64) - (g * lr).to(tl.float64) / root).to(tl.float32)
            _replace(
                place0,
                h,
                state0_change + i[:, None] * state0_change_stride + column,
                mask,
                WITH_DELTA,
            )
        else:
            place0 = state0 + row[:, None] * state0_stride + column
            place1 = state1 + row[:, None] * state1_stride + column
            m = tl.load(place0, mask=mask, other=0.0) * beta1 + g * one_minus_beta1
            v = tl.load(place1, mask=mask, other=0.0) * beta2 + (g * g) * one_minus_beta2
            root = tl.sqrt_rn(tl.div_rn(v, zero + correction2)) + eps
            new = w - tl.div_rn(tl.div_rn(m, zero + correction1), root) * lr
            _replace(
                place0,
                m,
                state0_change + i[:, None] * state0_change_stride + column,
                mask,
                WITH_DELTA,
            )
            _replace(
                place1,
                v,
                state1_change + i[:, None] * state1_change_stride + column,
                mask,
                WITH_DELTA,
            )
        change = weights_change + i[:, None] * weights_change_stride + column
        _replace(place, _as_weights(new, weights), change, mask, WITH_DELTA)


def update(
    weights: torch.Tensor,
    states: list[torch.Tensor],
    rows: torch.Tensor,
    gradients: torch.Tensor,
    optimizer: str,
    hyper: Hyper,
    delta: torch.Tensor | None,
) -> None:
    parts = [weights, *states]
    changes = None if delta is None else _change_views(parts, delta)
    # threads read what others have written over
    if delta is not None and delta.data_ptr() == gradients.data_ptr():
        gradients = gradients.clone()
    n, dimension = gradients.shape
    places = [(part, part.stride(0)) for part in (parts + [weights] * 2)[:3]]
    targets = [(part, part.stride(0)) for part in ((changes or parts) + [weights] * 2)[:3]]
    _update[(triton.cdiv(n, _ROWS_PER_PROGRAM),)](
        *places[0],
        *places[1],
        *places[2],
        rows,
        gradients,
        gradients.stride(0),
        *targets[0],
        *targets[1],
        *targets[2],
        n,
        dimension,
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
        WITH_DELTA=delta is not None,
        ROWS=_ROWS_PER_PROGRAM,
        num_warps=4,
        enable_fp_fusion=False,
    )
    if delta is not None and changes is not None:
        _copy_back(changes, delta)


def _change_views(parts: list[torch.Tensor], delta: torch.Tensor) -> list[torch.Tensor]:
    """Integers of the parts' element sizes over `delta`'s memory.

    A part whose place in `delta` is not aligned gets new memory.
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


def _copy_back(changes: list[torch.Tensor], delta: torch.Tensor) -> None:
    at = 0
    for change in changes:
        width = change.shape[1] * change.element_size()
        if change.data_ptr() != delta.data_ptr() + at:
            delta[:, at : at + width] = change.contiguous().view(torch.uint8)
        at += width

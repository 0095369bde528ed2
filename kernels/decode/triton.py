"""The GPU kernel: up to four outputs per read of the units, without copies of the units."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ecrm.kernels.triton_field import times
from ecrm.kernels.triton_rows import as_words, kernel, pieces, programs, row_and_piece, vector_of

_ELEMENTS = 1024  # of a program
_AT_A_TIME = 4  # outputs


@kernel
def _multiply(
    table,
    k: tl.int64,
    matrix: tl.int64,
    out,
    out_stride: tl.int64,
    n: tl.int64,
    per_row: tl.int64,
    WANTED: tl.constexpr,
    VECTOR: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Multiply. `table` has addresses and row strides of units; coefficients begin at `matrix`."""
    i, piece = row_and_piece(per_row, COUNT)
    mask = (i < n)[:, None]
    sum0 = tl.zeros((COUNT, VECTOR), tl.uint32)
    sum1 = sum0
    sum2 = sum0
    sum3 = sum0
    for u in range(k):  # not unrolled: constants of all coefficients at once take all registers
        unit = tl.load(table + u).to(tl.pointer_type(out.dtype.element_ty))
        place = pieces(unit, i, tl.load(table + k + u), piece, VECTOR)
        value = tl.load(place, mask=mask, other=0).to(tl.uint32)
        factor = table + matrix + u
        sum0 ^= times(value, tl.load(factor).to(tl.uint32))
        if WANTED > 1:
            sum1 ^= times(value, tl.load(factor + k).to(tl.uint32))
        if WANTED > 2:
            sum2 ^= times(value, tl.load(factor + 2 * k).to(tl.uint32))
        if WANTED > 3:
            sum3 ^= times(value, tl.load(factor + 3 * k).to(tl.uint32))
    at = i * per_row + piece
    _put(out, at, sum0, mask, VECTOR)
    if WANTED > 1:
        _put(out, at + out_stride, sum1, mask, VECTOR)
    if WANTED > 2:
        _put(out, at + 2 * out_stride, sum2, mask, VECTOR)
    if WANTED > 3:
        _put(out, at + 3 * out_stride, sum3, mask, VECTOR)


@triton.jit
def _put(out, at, value, mask, VECTOR: tl.constexpr):
    tl.store(pieces(out, at, 1, 0, VECTOR), value.to(out.dtype.element_ty), mask=mask)


def multiply(planes: list[Tensor], matrix: Tensor, out: Tensor) -> None:
    k, wanted = len(planes), len(matrix)
    units = as_words(*planes, *out)[:k]
    words = out.view(units[0].dtype)
    vector = vector_of(*units, *words)
    n, per_row = len(units[0]), words.shape[2] // vector
    numbers = [unit.data_ptr() for unit in units] + [unit.stride(0) // vector for unit in units]
    table = _sent(torch.tensor(numbers + matrix.flatten().tolist()), out.device)
    for first in range(0, wanted, _AT_A_TIME):
        _multiply[programs(n, per_row, vector, _ELEMENTS)](
            table,
            k,
            (2 + first) * k,
            words[first],
            n * per_row,
            n,
            per_row,
            WANTED=min(_AT_A_TIME, wanted - first),
            VECTOR=vector,
            COUNT=_ELEMENTS // vector,
            num_warps=4,
            enable_fp_fusion=False,
        )


def _sent(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; the copy is under way, and nobody waits for the end."""
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)

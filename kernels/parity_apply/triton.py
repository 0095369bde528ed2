"""The GPU kernel: pieces of 16 bytes, with atomic XOR for repeated rows.

XOR has no order, so atomic XOR of integers gives the same bits every time.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from ecrm.kernels.triton_field import times
from ecrm.kernels.triton_rows import (
    ELEMENTS,
    as_words,
    kernel,
    pieces,
    programs,
    row_and_piece,
    vector_of,
)


@kernel
def _xor_rows(
    parity,
    parity_stride: tl.int64,
    rows,
    coefficients,
    coefficient: tl.int32,
    delta,
    delta_stride: tl.int64,
    n: tl.int64,
    FACTOR: tl.constexpr,
    UNIQUE: tl.constexpr,
    PER_ROW: tl.constexpr,
    VECTOR: tl.constexpr,
    COUNT: tl.constexpr,
):
    i, piece = row_and_piece(PER_ROW, COUNT)
    inside = i < n
    row = tl.load(rows + i, mask=inside, other=0)
    mask = inside[:, None]
    change = tl.load(pieces(delta, i, delta_stride, piece, VECTOR), mask=mask, other=0)
    change = change.to(tl.uint32)
    if FACTOR == "each":
        factors = tl.load(coefficients + i, mask=inside, other=0).to(tl.uint32)
        change = times(change, factors[:, None])
    elif FACTOR == "number":
        change = times(change, coefficient.to(tl.uint32))
    place = pieces(parity, row, parity_stride, piece, VECTOR)
    if UNIQUE:
        old = tl.load(place, mask=mask, other=0)
        tl.store(place, old ^ change.to(place.dtype.element_ty), mask=mask)
    else:
        tl.atomic_xor(place, change.to(tl.int32), mask=mask, sem="relaxed")


def apply(
    parity: Tensor, rows: Tensor, coefficients: Tensor | int, delta: Tensor, unique: bool
) -> None:
    """As in the package. A single number for `coefficients` must not be 0."""
    parity, delta = as_words(parity, delta)
    if not unique and parity.dtype == torch.uint8:  # atomics are of words: sum by row first
        rows, places = rows.unique(return_inverse=True)
        padded = pad(delta, (0, -delta.shape[1] % 4))
        sums = torch.zeros(len(rows), padded.shape[1], dtype=torch.uint8, device=delta.device)
        apply(sums, places, coefficients, padded, unique=False)
        coefficients, delta, unique = 1, sums[:, : delta.shape[1]], True
    vector = vector_of(parity, delta)
    per_row = delta.shape[1] // vector
    one = isinstance(coefficients, int)
    _xor_rows[programs(len(rows), per_row, vector)](
        parity,
        parity.stride(0) // vector,
        rows,
        rows if isinstance(coefficients, int) else coefficients,
        coefficients if isinstance(coefficients, int) else 0,
        delta,
        delta.stride(0) // vector,
        len(rows),
        FACTOR="each" if not one else "none" if coefficients == 1 else "number",
        UNIQUE=unique,
        PER_ROW=per_row,
        VECTOR=vector,
        COUNT=ELEMENTS // vector,
        num_warps=4,
        enable_fp_fusion=False,
    )

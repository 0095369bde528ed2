"""The GPU kernel: deltas grouped by row, each parity row read and written once.

Rows may repeat, so two programs must not change the same row at once. The deltas are sorted by row;
the program of the first delta of a row adds all deltas of that row, the others end at once. No
atomics, so any width and alignment will do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ecrm.kernels.triton_field import as_words, times


@triton.jit
def _add_rows(
    parity,
    parity_stride,
    sorted_rows,
    order,
    coefficients,
    delta,
    delta_stride,
    n,
    width,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(sorted_rows + i)
    before = tl.load(sorted_rows + i - 1, mask=i > 0, other=-1)
    if row != before:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        place = parity + row * parity_stride + at
        total = tl.load(place, mask=inside, other=0).to(tl.uint32)
        j = i
        here = row
        while here == row:
            k = tl.load(order + j)
            value = tl.load(delta + k * delta_stride + at, mask=inside, other=0).to(tl.uint32)
            total ^= times(value, tl.load(coefficients + k).to(tl.uint32))
            j += 1
            here = tl.load(sorted_rows + j, mask=j < n, other=-1)
        tl.store(place, total.to(parity.dtype.element_ty), mask=inside)


def apply(
    parity: torch.Tensor, rows: torch.Tensor, coefficients: torch.Tensor, delta: torch.Tensor
) -> None:
    sorted_rows, order = torch.sort(rows)
    parity, delta = as_words(parity, delta)
    n, width = delta.shape
    block = min(1024, triton.next_power_of_2(width))
    _add_rows[(n, triton.cdiv(width, block))](
        parity,
        parity.stride(0),
        sorted_rows,
        order,
        coefficients.contiguous(),
        delta,
        delta.stride(0),
        n,
        width,
        BLOCK=block,
        num_warps=1 if block <= 128 else 4,
    )

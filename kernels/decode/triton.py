"""The GPU kernel: each program computes one block of one wanted unit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ecrm.kernels.triton_field import as_words, times


@triton.jit
def _multiply(units, unit_stride, row_stride, k, matrix, out, size, width, BLOCK: tl.constexpr):
    wanted = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    at = (place // width) * row_stride + place % width
    total = tl.zeros((BLOCK,), tl.uint32)
    for unit in range(k):
        value = tl.load(units + at, mask=inside, other=0).to(tl.uint32)
        total ^= times(value, tl.load(matrix + wanted * k + unit).to(tl.uint32))
        # not unit * unit_stride, which is a product of 32 bits where the stride fits into them
        units += unit_stride
    tl.store(out + wanted.to(tl.int64) * size + place, total.to(out.dtype.element_ty), mask=inside)


def multiply(planes: list[torch.Tensor], matrix: torch.Tensor, out: torch.Tensor) -> None:
    k, wanted = len(planes), out.shape[0]
    units, out = as_words(torch.stack(planes), out)
    _, n, width = units.shape
    block = 1024
    _multiply[(triton.cdiv(n * width, block), wanted)](
        units,
        units.stride(0),
        units.stride(1),
        k,
        matrix.to(out.device).contiguous(),
        out,
        n * width,
        width,
        BLOCK=block,
        num_warps=4,
    )

"""The GPU kernel: initial values of all rows, or of the never updated rows alone."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ecrm.kernels.hash_uniform.reference import GAMMA, mix_number
from ecrm.kernels.triton_rows import (
    ELEMENTS,
    kernel,
    pieces,
    programs,
    row_and_piece,
    vector_of,
)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@kernel
def _fill(
    out,
    out_stride: tl.int64,
    targets,
    touched,
    touched_stride: tl.int64,
    seed_key: tl.uint64,
    tables,
    table_step: tl.int64,
    rows,
    bounds,
    bound_step: tl.int64,
    n: tl.int64,
    BEGUN: tl.constexpr,
    PER_ROW: tl.constexpr,
    VECTOR: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Fill `out`; with `BEGUN`, only the rows of `targets` with `touched` of 0."""
    STEP: tl.constexpr = 0x9E3779B97F4A7C15
    i, piece = row_and_piece(PER_ROW, COUNT)
    wanted = i < n
    target = i
    if BEGUN:
        target = tl.load(targets + i, mask=wanted, other=0)
        flag = tl.load(touched + target * touched_stride, mask=wanted, other=1.0)
        wanted = wanted & (flag == 0)
    table = tl.load(tables + i * table_step, mask=wanted, other=0).to(tl.uint64)
    row = tl.load(rows + i, mask=wanted, other=0).to(tl.uint64)
    bound = tl.load(bounds + i * bound_step, mask=wanted, other=0.0)
    row_key = _mix(_mix(table ^ seed_key.to(tl.uint64)) + (row + 1) * STEP)
    column = (piece * VECTOR)[:, None] + tl.arange(0, VECTOR)[None, :].to(tl.uint32)
    bits = _mix(row_key[:, None] + (column + 1).to(tl.uint64) * STEP) >> 40
    centred = bits.to(tl.int32) - 0x800000
    value = (centred.to(tl.float32) * (1.0 / 0x800000)) * bound[:, None] + 0.0
    tl.store(pieces(out, target, out_stride, piece, VECTOR), value, mask=wanted[:, None])


def fill(
    seed: int,
    tables: Tensor,
    table_step: int,
    rows: Tensor,
    bounds: Tensor,
    bound_step: int,
    out: Tensor,
    begun: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Fill `out`; with `begun`, (targets, touched), only the never updated rows of `targets`."""
    n, dimension = len(rows), out.shape[1]
    targets, touched = (rows, out) if begun is None else begun
    vector = vector_of(out)
    per_row = dimension // vector
    _fill[programs(n, per_row, vector)](
        out,
        out.stride(0) // vector,
        targets,
        touched,
        touched.stride(0),
        mix_number((seed + GAMMA) % 2**64),
        tables,
        table_step,
        rows,
        bounds,
        bound_step,
        n,
        BEGUN=begun is not None,
        PER_ROW=per_row,
        VECTOR=vector,
        COUNT=ELEMENTS // vector,
        num_warps=4,
        enable_fp_fusion=False,
    )

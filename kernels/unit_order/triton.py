"""The GPU kernels: keys, torch's sort, and the places of the rows after the sort."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ecrm.kernels.triton_rows import kernel

_ROWS = 1024  # of a program

LARGEST = 1 << 62
"""The bound of row numbers. A key keeps room for the unit."""


@kernel
def _key(rows, keys, n: tl.int64, units: tl.int64, span: tl.int64, ROWS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows + i, mask=i < n, other=0)
    period = row // units
    tl.store(keys + i, (row - period * units) * span + period, mask=i < n)


@kernel
def _first(keys, first, n: tl.int64, ROWS: tl.constexpr):
    """Write `first`, int64: 1 for a sorted key different from the key before, else 0."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    key = tl.load(keys + i, mask=i < n, other=0)
    before = tl.load(keys + i - 1, mask=(i > 0) & (i < n), other=-1)
    tl.store(first + i, (key != before).to(tl.int64), mask=i < n)


@kernel
def _place(
    keys,
    order,
    ranks,
    unique,
    places,
    n: tl.int64,
    units: tl.int64,
    span: tl.int64,
    ROWS: tl.constexpr,
):
    """Write unique rows and places. `ranks`, int64, counts the different keys up to every key."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = i < n
    key = tl.load(keys + i, mask=inside, other=0)
    place = tl.load(ranks + i, mask=inside, other=1) - 1
    tl.store(places + tl.load(order + i, mask=inside, other=0), place, mask=inside)
    unit = key // span
    # equal keys write the same number to the same place
    tl.store(unique + place, (key - unit * span) * units + unit, mask=inside)


def unique_by_unit(rows: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """As in the package. Waits for the GPU once, for the number of different rows."""
    unique, places, keys = (torch.empty_like(rows) for _ in range(3))
    n, span = len(rows), LARGEST // units + 1
    if not n:
        return unique, places
    grid, options = (triton.cdiv(n, _ROWS),), {"num_warps": 4, "enable_fp_fusion": False}
    _key[grid](rows, keys, n, units, span, ROWS=_ROWS, **options)
    keys, order = torch.sort(keys)
    first = torch.empty_like(rows)
    _first[grid](keys, first, n, ROWS=_ROWS, **options)
    ranks = first.cumsum(0)
    _place[grid](keys, order, ranks, unique, places, n, units, span, ROWS=_ROWS, **options)
    return unique[: int(ranks[-1])], places

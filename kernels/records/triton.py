"""The GPU kernels: a launch for every part of a record, and the merging into a log."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
def _move(
    part,
    part_stride: tl.int64,
    rows,
    records,
    records_stride: tl.int64,
    picked,
    n: tl.int64,
    OPERATION: tl.constexpr,
    PICKED: tl.constexpr,
    PER_ROW: tl.constexpr,
    VECTOR: tl.constexpr,
    COUNT: tl.constexpr,
):
    i, piece = row_and_piece(PER_ROW, COUNT)
    inside = i < n
    mask = inside[:, None]
    row = tl.load(rows + i, mask=inside, other=0)
    if PICKED:
        i = tl.load(picked + i, mask=inside, other=0)
    place = pieces(part, row, part_stride, piece, VECTOR)
    record = pieces(records, i, records_stride, piece, VECTOR)
    if OPERATION == "gather_records":
        tl.store(record, tl.load(place, mask=mask, other=0), mask=mask)
    elif OPERATION == "scatter_records":
        tl.store(place, tl.load(record, mask=mask, other=0), mask=mask)
    else:
        change = tl.load(record, mask=mask, other=0)
        tl.store(place, tl.load(place, mask=mask, other=0) ^ change, mask=mask)


def move(
    operation: str,
    parts: list[Tensor],
    rows: Tensor,
    records: Tensor,
    picked: Tensor | None = None,
) -> None:
    """Run `gather_records`, `scatter_records` or `xor_records`, part by part."""
    at = 0
    for part in parts:
        width = part.shape[1] * part.element_size()
        part, some = as_words(part, records[:, at : at + width])
        at += width
        vector = vector_of(part, some)
        per_row = some.shape[1] // vector
        _move[programs(len(rows), per_row, vector)](
            part,
            part.stride(0) // vector,
            rows,
            some,
            some.stride(0) // vector,
            rows if picked is None else picked,
            len(rows),
            OPERATION=operation,
            PICKED=picked is not None,
            PER_ROW=per_row,
            VECTOR=vector,
            COUNT=ELEMENTS // vector,
            num_warps=4,
            enable_fp_fusion=False,
        )


@kernel
def _ask(places, rows, new, n: tl.int64, COUNT: tl.constexpr):
    """Write `new`, int32: 1 for a row not yet in the log, else 0."""
    i = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = i < n
    row = tl.load(rows + i, mask=inside, other=0)
    place = tl.load(places + row, mask=inside, other=0)
    tl.store(new + i, (place == 0).to(tl.int32), mask=inside)


@kernel
def _merge(
    log,
    log_rows,
    places,
    counter,
    rows,
    delta,
    delta_stride: tl.int64,
    new,
    rank,
    n: tl.int64,
    PER_ROW: tl.constexpr,
    VECTOR: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Merge. `rank`, int32, counts the new rows up to every row.

    The kernel writes the places of new rows, and does not read these places.
    """
    i, piece = row_and_piece(PER_ROW, COUNT)
    inside = i < n
    row = tl.load(rows + i, mask=inside, other=0)
    appended = tl.load(new + i, mask=inside, other=0) != 0
    known = inside & (appended == 0)
    last = tl.load(counter) + tl.load(rank + i, mask=inside, other=0)
    place = tl.where(appended, last, tl.load(places + row, mask=known, other=1).to(tl.int64))
    target = pieces(log, place - 1, PER_ROW, piece, VECTOR)
    mask = inside[:, None]
    change = tl.load(pieces(delta, i, delta_stride, piece, VECTOR), mask=mask, other=0)
    old = tl.load(target, mask=known[:, None], other=0)
    tl.store(target, old ^ change, mask=mask)
    first = inside & appended & (piece == 0)
    tl.store(log_rows + place - 1, row, mask=first)
    tl.store(places + row, place.to(tl.int32), mask=first)


def merge(
    log_rows: Tensor,
    log: Tensor,
    places: Tensor,
    counter: Tensor,
    rows: Tensor,
    delta: Tensor,
) -> None:
    n = len(rows)
    new = torch.empty(n, dtype=torch.int32, device=rows.device)
    _ask[(triton.cdiv(n, ELEMENTS),)](
        places, rows, new, n, COUNT=ELEMENTS, num_warps=4, enable_fp_fusion=False
    )
    rank = new.cumsum(0, dtype=torch.int32)
    log, delta = as_words(log, delta)
    vector = vector_of(log, delta)
    per_row = delta.shape[1] // vector
    _merge[programs(n, per_row, vector)](
        log,
        log_rows,
        places,
        counter,
        rows,
        delta,
        delta.stride(0) // vector,
        new,
        rank,
        n,
        PER_ROW=per_row,
        VECTOR=vector,
        COUNT=ELEMENTS // vector,
        num_warps=4,
        enable_fp_fusion=False,
    )
    counter += rank[-1:]

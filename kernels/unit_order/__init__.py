"""Sort rows by shard and by unit of the stripe, so that all data for one rank lies together.

Local row r of a shard is data unit `r % units` of a stripe, in the period `r // units`. Legend: n
rows, U different rows. `rows` is int64 [n], contiguous, not negative, n below 2^32. On a GPU all
row numbers are below 2^62 (not checked). All functions raise TypeError or ValueError, with the
numbers.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ecrm.kernels import check, dispatch, native

__all__ = ["Uses", "split_by_shard", "split_by_unit", "unique_by_unit", "unique_with_uses"]

_LARGEST = (1 << 63) - 1


class Uses(NamedTuple):
    """The n uses of U unique rows, row by row.

    Args:
        starts: int32 [U + 1]. The uses of row u are `order[starts[u] : starts[u + 1]]`.
        order: int32 [n]. The places of the uses, ascending within a row.
    """

    starts: Tensor
    order: Tensor


def unique_by_unit(rows: Tensor, units: int, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Sort and deduplicate rows, unit by unit, ascending within a unit.

    Returns the unique rows, int64 [U], and the place of every row among the unique rows, int64 [n].
    """
    chosen = _choose("unique_by_unit", rows, units, backend, has_triton=True)
    if chosen == "triton":
        from ecrm.kernels.unit_order import triton

        return triton.unique_by_unit(rows, units)
    if chosen == "reference":
        from ecrm.kernels.unit_order import reference

        return reference.unique_by_unit(rows, units)
    unique, places = torch.empty_like(rows), torch.empty_like(rows)
    count = native.library().ecrm_unique_by_unit(
        rows.data_ptr(), rows.shape[0], units, unique.data_ptr(), places.data_ptr(), None, None
    )
    return unique[:count], places


def unique_with_uses(
    rows: Tensor, units: int, backend: str = "auto"
) -> tuple[Tensor, Tensor, Uses]:
    """Like `unique_by_unit`, with the uses of every unique row, from the same sort.

    `rows` has fewer than 2^31 elements.
    """
    chosen = _choose("unique_with_uses", rows, units, backend)
    if rows.shape[0] >> 31:
        raise ValueError(f"{rows.shape[0]} rows, needed: fewer than 2^31")
    if chosen == "reference":
        from ecrm.kernels.unit_order import reference

        unique, places, uses = reference.unique_with_uses(rows, units)
        return unique, places, Uses(*uses)
    unique, places = torch.empty_like(rows), torch.empty_like(rows)
    starts = torch.empty(rows.shape[0] + 1, dtype=torch.int32)
    order = torch.empty(rows.shape[0], dtype=torch.int32)
    count = native.library().ecrm_unique_by_unit(
        rows.data_ptr(),
        rows.shape[0],
        units,
        unique.data_ptr(),
        places.data_ptr(),
        starts.data_ptr(),
        order.data_ptr(),
    )
    return unique[:count], places, Uses(starts[: count + 1], order)


def split_by_unit(
    rows: Tensor, units: int, backend: str = "auto"
) -> tuple[list[int], Tensor, bool]:
    """Count the rows of every unit, and compute the period of every row.

    Returns a list of `units` counts, the periods, int64 [n], and whether the units of the rows
    ascend.
    """
    chosen = _choose("split_by_unit", rows, units, backend)
    if chosen == "reference":
        from ecrm.kernels.unit_order import reference

        return reference.split_by_unit(rows, units)
    periods, counts = torch.empty_like(rows), (ctypes.c_int64 * units)()
    ascend = native.library().ecrm_split_by_unit(
        rows.data_ptr(), rows.shape[0], units, periods.data_ptr(), counts
    )
    return list(counts), periods, bool(ascend)


def split_by_shard(
    rows: Tensor, k: int, m: int, shards: int, backend: str = "auto"
) -> tuple[list[int], Tensor, Tensor]:
    """Sort the rows of a row space by the hosting shard.

    Stripes have `k` data and `m` parity units over `shards` shards, as in `ecrm.placement.stripes`.

    Returns the number of rows per shard; then, shard by shard and in the given order within a
    shard, the places in `rows`, int64 [n], and the local row numbers in the shard, int64 [n].
    """
    chosen = _choose("split_by_shard", rows, k, backend)
    if m < 0 or k + m > shards:
        raise ValueError(
            f"stripes of {k}+{m} units on {shards} shards, needed: at least as many shards"
        )
    if chosen == "reference":
        from ecrm.kernels.unit_order import reference

        return reference.split_by_shard(rows, k, m, shards)
    places, local = torch.empty_like(rows), torch.empty_like(rows)
    counts = torch.empty(shards, dtype=torch.int64)
    native.library().ecrm_split_by_shard(
        rows.data_ptr(),
        rows.shape[0],
        k,
        m,
        shards,
        places.data_ptr(),
        local.data_ptr(),
        counts.data_ptr(),
    )
    return counts.tolist(), places, local


def _choose(
    operation: str, rows: Tensor, units: int, backend: str, has_triton: bool = False
) -> str:
    check.row_numbers("rows", rows, _LARGEST)
    if units < 1:
        raise ValueError(f"{units} units, needed: at least 1")
    if rows.shape[0] >> 32:
        raise ValueError(f"{rows.shape[0]} rows, needed: fewer than 2^32")
    return dispatch.choose(operation, backend, rows.device, has_triton)

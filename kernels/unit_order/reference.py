"""The definition, in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor


def unique_by_unit(rows: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """As in the package."""
    unique, places = rows.unique(return_inverse=True)
    order = (unique % units).argsort(stable=True)
    new_place = torch.empty_like(order)
    new_place[order] = torch.arange(order.numel(), device=rows.device)
    return unique[order], new_place[places]


def unique_with_uses(rows: Tensor, units: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """As in the package, with the uses as a tuple of starts and order."""
    unique, places = unique_by_unit(rows, units)
    counts = torch.bincount(places, minlength=unique.numel())
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    order = places.argsort(stable=True)
    return unique, places, (starts.to(torch.int32), order.to(torch.int32))


def split_by_unit(rows: Tensor, units: int) -> tuple[list[int], Tensor, bool]:
    """As in the package."""
    unit = rows % units
    return (
        torch.bincount(unit, minlength=units).tolist(),
        rows // units,
        not bool((unit.diff() < 0).any()),
    )


def split_by_shard(rows: Tensor, k: int, m: int, shards: int) -> tuple[list[int], Tensor, Tensor]:
    """As in the package."""
    stripe, unit = rows // k, rows % k
    shard = (stripe + m + unit) % shards
    places = shard.argsort(stable=True)
    return (
        torch.bincount(shard, minlength=shards).tolist(),
        places,
        (stripe // shards * k + unit)[places],
    )

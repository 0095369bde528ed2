"""The definition, for any device: round r adds the r-th occurrence of every index."""

from __future__ import annotations

import torch


def add(
    out: torch.Tensor, index: torch.Tensor, values: torch.Tensor, seen: torch.Tensor | None = None
) -> None:
    if seen is not None:
        out[index[seen[index] == 0]] = 0
        seen[index] = 1
        out = out[:, : values.shape[1]]
    order = torch.sort(index, stable=True).indices
    grouped = index[order]
    places = torch.arange(index.shape[0], device=index.device)
    starts = torch.ones_like(grouped, dtype=torch.bool)
    starts[1:] = grouped[1:] != grouped[:-1]
    occurrence = places - torch.cummax(torch.where(starts, places, 0), dim=0).values
    for r in range(int(occurrence.max()) + 1):
        chosen = order[occurrence == r]
        out[index[chosen]] += values[chosen]

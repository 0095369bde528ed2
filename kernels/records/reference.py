"""The definition, in torch indexing; runs on any device."""

from __future__ import annotations

import torch


def gather_records(parts: list[torch.Tensor], rows: torch.Tensor, records: torch.Tensor) -> None:
    records[:] = torch.cat([_bytes(part[rows]) for part in parts], dim=1)


def scatter_records(parts: list[torch.Tensor], rows: torch.Tensor, records: torch.Tensor) -> None:
    at = 0
    for part in parts:
        width = part.shape[1] * part.element_size()
        part[rows] = records[:, at : at + width].contiguous().view(part.dtype)
        at += width


def xor_records(parts: list[torch.Tensor], rows: torch.Tensor, delta: torch.Tensor) -> None:
    old = torch.empty_like(delta, memory_format=torch.contiguous_format)
    gather_records(parts, rows, old)
    scatter_records(parts, rows, old ^ delta)


def merge_records(log_rows: torch.Tensor, log: torch.Tensor, count: int, places: torch.Tensor, rows: torch.Tensor, delta: torch.Tensor) -> int:
    new = places[rows] == 0
    total = count + int(new.sum())
    log_rows[count:total], log[count:total] = rows[new], 0
    places[rows[new]] = torch.arange(count + 1, total + 1, dtype=places.dtype, device=places.device)
    log[places[rows].long() - 1] ^= delta
    return total


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8).reshape(values.shape[0], -1)

"""The definition, in torch indexing; runs on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ecrm.kernels.records import RecordLog


def gather_records(parts: list[torch.Tensor], rows: torch.Tensor, records: torch.Tensor) -> None:
    records[:] = torch.cat([_bytes(part[rows]) for part in parts], dim=1)


def scatter_records(
    parts: list[torch.Tensor],
    rows: torch.Tensor,
    records: torch.Tensor,
    picked: torch.Tensor | None = None,
) -> None:
    records = records if picked is None else records[picked]
    at = 0
    for part in parts:
        width = part.shape[1] * part.element_size()
        part[rows] = records[:, at : at + width].contiguous().view(part.dtype)
        at += width


def xor_records(parts: list[torch.Tensor], rows: torch.Tensor, delta: torch.Tensor) -> None:
    old = torch.empty_like(delta, memory_format=torch.contiguous_format)
    gather_records(parts, rows, old)
    scatter_records(parts, rows, old ^ delta)


def merge_records(log: RecordLog, rows: torch.Tensor, delta: torch.Tensor) -> None:
    new = log.places[rows] == 0
    total = log.count + int(new.sum())
    log.rows[log.count : total], log.records[log.count : total] = rows[new], 0
    log.places[rows[new]] = torch.arange(
        log.count + 1, total + 1, dtype=log.places.dtype, device=rows.device
    )
    log.records[log.places[rows].long() - 1] ^= delta
    log.count = total


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8).reshape(values.shape[0], -1)

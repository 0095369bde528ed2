"""Copies of another shard's rows, overwritten when a new one comes, with the way back to the commit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ecrm.protection.parity import ParityRows
from ecrm.storage.base import Allocate, lazy_zeros


class BackupRows(ParityRows):
    """Parity rows that are whole records; one that was passed over is stale: not what the row is now."""

    def __init__(self, rows: int, record_bytes: int, missing: bool, allocate: Allocate = lazy_zeros) -> None:
        super().__init__(rows, record_bytes, missing, allocate)
        self._stale = lazy_zeros(rows, dtype=np.bool_)
        self._overwritten: list[tuple[Tensor, Tensor]] = []
        self._marked: list[tuple[Tensor, Tensor]] = []

    def stale(self, rows: Tensor | slice) -> Tensor:
        """Bool [R]: which rows were passed over when they changed."""
        return self._stale[rows]

    def passed_over(self, rows: Tensor) -> None:
        """These rows have changed, and are not sent; missing ones are rebuilt as they are then."""
        self._mark(self._kept(rows)[0], True)

    def _mark(self, rows: Tensor, stale: bool) -> None:
        if rows.numel():
            self._marked.append((rows, self._stale[rows]))
            self._stale[rows] = stale

    def _kept(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Those of `rows` that are not missing, and their places."""
        keep = torch.arange(rows.numel())
        if self.missing is not None:
            keep = (~self.missing.among(rows)).nonzero().squeeze(1)
        return rows[keep], keep

    @property
    def log_bytes(self) -> int:
        return sum(tensor.nbytes for entry in (*self._overwritten, *self._marked) for tensor in entry)

    def put(self, rows: Tensor, records: Tensor) -> None:
        """Overwrite unique rows with records, uint8 [R, B]; missing ones are passed over: rebuilding them reads rows as they are then."""
        rows, keep = self._kept(rows)
        self._mark(rows, False)
        if rows.numel():
            self._overwritten.append((rows, self.records.index_select(0, rows)))
            self.records[rows] = records[keep]

    def undo(self) -> None:
        for rows, records in reversed(self._overwritten):
            self.records[rows] = records
        for rows, stale in reversed(self._marked):
            self._stale[rows] = stale
        self._overwritten.clear()
        self._marked.clear()
        super().undo()

    def committed(self) -> None:
        self._overwritten.clear()
        self._marked.clear()
        super().committed()

"""Copies of another shard's rows, and the log for going back to the commit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ecrm.base.allocate import Allocate, lazy_zeros
from ecrm.device.copies import on_device
from ecrm.kernels.records import gather_records, scatter_records
from ecrm.protection.parity import ParityRows


class BackupRows(ParityRows):
    """Parity rows that are whole records. A row passed over when it changed is stale."""

    def __init__(
        self, rows: int, record_bytes: int, missing: bool, allocate: Allocate = lazy_zeros
    ) -> None:
        super().__init__(rows, record_bytes, missing, allocate)
        self._words = self.records.view(torch.float32)  # kernels take records as whole floats
        self._stale = lazy_zeros(rows, dtype=np.bool_)
        self._overwritten: list[tuple[Tensor, Tensor]] = []
        self._marked: list[tuple[Tensor, Tensor]] = []

    def stale(self, rows: Tensor | slice) -> Tensor:
        """Bool [R]: whether a row was passed over at a change."""
        return self._stale[rows]

    def passed_over(self, rows: Tensor) -> None:
        """Mark rows stale: changed but not sent. Missing rows stay unmarked, to be rebuilt anew."""
        self._mark(rows[self._kept(rows)].clone(), True)

    def _mark(self, rows: Tensor, stale: bool) -> None:
        if rows.numel():
            self._marked.append((rows, self._stale[rows]))
            self._stale[rows] = stale

    def _kept(self, rows: Tensor) -> Tensor | slice:
        """The places in `rows` of the rows that are not missing."""
        return (
            slice(None)
            if self.missing is None
            else (~self.missing.among(rows)).nonzero().squeeze(1)
        )

    @property
    def log_bytes(self) -> int:
        return sum(
            tensor.nbytes for entry in (*self._overwritten, *self._marked) for tensor in entry
        )

    def put(self, rows: Tensor, records: Tensor) -> None:
        """Overwrite unique rows with records, uint8 [R, B].

        Missing rows are passed over: rebuilding later reads the current rows.
        """
        keep = self._kept(rows)
        # a clone: the log must not keep the whole received message alive
        rows, records = rows[keep].clone(), on_device(self.device, records[keep])
        self._mark(rows, False)
        if rows.numel():
            rows = on_device(self.device, rows)
            self._overwritten.append((rows, gather_records(self._words, (), rows)))
            scatter_records(self._words, (), rows, records)

    def undo(self) -> None:
        for rows, records in reversed(self._overwritten):
            scatter_records(self._words, (), rows, records)
        for rows, stale in reversed(self._marked):
            self._stale[rows] = stale
        self._overwritten.clear()
        self._marked.clear()
        super().undo()

    def committed(self) -> None:
        self._overwritten.clear()
        self._marked.clear()
        super().committed()

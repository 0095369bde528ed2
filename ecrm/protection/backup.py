"""Copies of another shard's rows, and the log that takes them back to the commit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ecrm.base.allocate import Allocate, lazy_zeros
from ecrm.kernels.records import gather_records, scatter_records
from ecrm.protection.parity import ParityRows
from ecrm.transport.gpu_copies import on_device


class BackupRows(ParityRows):
    """Parity rows that are whole records; one that was passed over is stale."""

    def __init__(
        self, rows: int, record_bytes: int, missing: bool, allocate: Allocate = lazy_zeros
    ) -> None:
        super().__init__(rows, record_bytes, missing, allocate)
        self._words = self.records.view(torch.float32)  # as the kernels take records: whole floats
        self._stale = lazy_zeros(rows, dtype=np.bool_)
        self._overwritten: list[tuple[Tensor, Tensor]] = []
        self._marked: list[tuple[Tensor, Tensor]] = []

    def stale(self, rows: Tensor | slice) -> Tensor:
        """Bool [R]: which rows were passed over when they changed."""
        return self._stale[rows]

    def passed_over(self, rows: Tensor) -> None:
        """These rows have changed, and are not sent; missing ones are rebuilt as they are then."""
        self._mark(rows[self._kept(rows)].clone(), True)

    def _mark(self, rows: Tensor, stale: bool) -> None:
        if rows.numel():
            self._marked.append((rows, self._stale[rows]))
            self._stale[rows] = stale

    def _kept(self, rows: Tensor) -> Tensor | slice:
        """The places of those of `rows` that are not missing."""
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

        Missing ones are passed over: rebuilding them reads rows as they are then.
        """
        keep = self._kept(rows)
        # the rows are kept, not the message that they came in
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

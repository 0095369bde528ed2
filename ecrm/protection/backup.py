"""Copies of another shard's rows, overwritten when a new one comes, with the way back to the commit."""

from __future__ import annotations

from torch import Tensor

from ecrm.protection.parity import ParityRows


class BackupRows(ParityRows):
    """Parity rows that are whole records; one that was passed over is not what the row is now."""

    def __init__(self, rows: int, record_bytes: int, missing: bool) -> None:
        super().__init__(rows, record_bytes, missing)
        self._overwritten: list[tuple[Tensor, Tensor]] = []

    @property
    def log_bytes(self) -> int:
        return sum(tensor.nbytes for entry in self._overwritten for tensor in entry)

    def put(self, rows: Tensor, records: Tensor) -> None:
        """Overwrite unique rows with records, uint8 [R, B]; missing ones are passed over: rebuilding them reads rows as they are then."""
        if self.missing is not None:
            keep = (~self.missing.among(rows)).nonzero().squeeze(1)
            rows, records = rows[keep], records[keep]
        if rows.numel():
            self._overwritten.append((rows, self.records.index_select(0, rows)))
            self.records[rows] = records

    def undo(self) -> None:
        for rows, records in reversed(self._overwritten):
            self.records[rows] = records
        self._overwritten.clear()
        super().undo()

    def committed(self) -> None:
        self._overwritten.clear()
        super().committed()

"""The parity rows held by one shard for one row space, with the log for undoing a step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ecrm.base.allocate import Allocate, lazy_zeros
from ecrm.device.copies import on_device
from ecrm.kernels.parity_apply import parity_apply
from ecrm.storage.missing_rows import MissingRows


class ParityRows:
    """Parity `records`, uint8 [rows, record bytes], zero at first.

    All records lie on one `device`, the device of the memory. Given records and deltas may lie on
    any device. Row numbers are on the CPU. `missing` are the rows still to be recovered, or `None`.
    """

    def __init__(
        self, rows: int, record_bytes: int, missing: bool, allocate: Allocate = lazy_zeros
    ) -> None:
        self.records = allocate(rows, record_bytes, dtype=np.uint8)
        self.missing = MissingRows(rows) if missing and rows else None
        # row numbers and deltas, on the device of the parity
        self._log: list[tuple[Tensor, int, Tensor]] = []

    @property
    def device(self) -> torch.device:
        """The device of the records."""
        return self.records.device

    @property
    def missing_rows(self) -> int:
        return 0 if self.missing is None else self.missing.count

    @property
    def log_bytes(self) -> int:
        return sum(rows.nbytes + deltas.nbytes for rows, _, deltas in self._log)

    def read(self, rows: Tensor) -> Tensor:
        """Records, uint8 [R, record bytes]."""
        return self.records.index_select(0, on_device(self.device, rows))

    def last_bytes(self, rows: slice) -> Tensor:
        """The last byte of each record, uint8 [R]."""
        return self.records[rows, -1].contiguous()

    def restore(self, rows: Tensor, records: Tensor) -> None:
        """Fill in missing parity rows, uint8 [R, B]."""
        self.records[on_device(self.device, rows)] = on_device(self.device, records)
        if rows.numel():
            assert self.missing is not None, "only missing rows are restored"
            self.missing.remove(rows)

    def apply(self, rows: Tensor, coefficient: int, deltas: Tensor) -> None:
        """`records[rows] ^= coefficient * deltas` over GF(2^8), logged; no row comes twice.

        Missing rows are passed over: rebuilding reads data that already has the change.
        """
        if self.missing is not None:
            keep = (~self.missing.among(rows)).nonzero().squeeze(1)
            rows, deltas = rows[keep], deltas[keep]
        if rows.numel():
            rows, deltas = on_device(self.device, rows), on_device(self.device, deltas)
            parity_apply(self.records, rows, coefficient, deltas, unique=True)
            self._log.append((rows, coefficient, deltas))

    def undo(self) -> None:
        """Take back every logged delta: apply the delta again. A second call changes nothing."""
        for rows, coefficient, deltas in self._log:
            parity_apply(self.records, rows, coefficient, deltas, unique=True)
        self._log.clear()
        if self.missing is not None:
            self.records[on_device(self.device, self.missing.undo())] = 0

    def correct(self, rows: Tensor, error: Tensor) -> None:
        """Take an error, uint8 [record bytes], out of rows for good."""
        self.records[on_device(self.device, rows)] ^= on_device(self.device, error)

    def committed(self) -> None:
        """Forget the log."""
        self._log.clear()
        if self.missing is not None:
            self.missing.committed()
            if not self.missing.count:
                self.missing = None

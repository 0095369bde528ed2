"""What takes the updates since the last commit back, and is what parity gets when they are committed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ecrm.kernels.records import merge_records
from ecrm.storage.base import Store, lazy_zeros


class UndoLog:
    """Rows updated since the last commit and the XOR of each record then and now, of one shard of `rows` rows.

    One update is kept as it came. From the second one on they are merged as they come: a row that is updated again takes no more room, and
    a commit has nothing left to do.
    """

    def __init__(self, rows: int, record_bytes: int) -> None:
        self._rows, self._record_bytes = rows, record_bytes
        self._update: tuple[Tensor, Tensor] | None = None
        self._count = 0
        self._room = torch.empty(0, dtype=torch.int64), torch.empty(0, record_bytes, dtype=torch.uint8)
        self._places: Tensor | None = None  # of each row in there, from 1

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds, and of the table of places once there is one."""
        return sum(part.nbytes for part in self.deltas()) + (0 if self._places is None else self._places.nbytes)

    def add(self, rows: Tensor, delta: Tensor) -> None:
        """Unique rows, int64 [R], were updated; their old XOR new records, uint8 [R, B], are this log's from now on."""
        if self._update is None and not self._count:
            self._update = rows, delta
            return
        if self._update is not None:
            update, self._update = self._update, None
            self._merge(*update)
        self._merge(rows, delta)

    def deltas(self) -> tuple[Tensor, Tensor]:
        """Unique rows, int64 [R], and the XOR of each record at the commit and now, uint8 [R, B]: of one update in its order, of several in the order
        in which rows were first updated. Views: valid until the next call of another method."""
        return self._update or (self._room[0][: self._count], self._room[1][: self._count])

    def clear(self) -> None:
        """Forget everything. What it took to merge is kept for the next time."""
        if self._count:
            self._places[self._room[0][: self._count]] = 0
        self._update, self._count = None, 0

    def undo(self, store: Store) -> None:
        """Apply every delta to `store` again, which takes it back, and forget it."""
        store.xor(*self.deltas())
        self.clear()

    def _merge(self, rows: Tensor, delta: Tensor) -> None:
        if self._places is None:
            self._places = lazy_zeros(self._rows, dtype=np.int32)
        if self._count + rows.numel() > self._room[0].numel():
            self._grow(self._count + rows.numel())
        self._count = merge_records(*self._room, self._count, self._places, rows, delta)

    def _grow(self, least: int) -> None:
        old, capacity = self.deltas(), max(least, 2 * self._room[0].numel())
        self._room = torch.empty(capacity, dtype=torch.int64), torch.empty(capacity, self._record_bytes, dtype=torch.uint8)
        for new, held in zip(self._room, old, strict=True):
            new[: self._count] = held

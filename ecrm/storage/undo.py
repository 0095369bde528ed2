"""What takes the updates since the last commit back, and is what parity gets when they are committed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ecrm.kernels.records import merge_records
from ecrm.kernels.unit_order import split_by_unit
from ecrm.storage.base import Store, lazy_zeros

Deltas = list[tuple[Tensor, Tensor]]
"""Local rows of a shard, int64 [R], none of them twice, and the XOR of each record before and after, uint8 [R, B], in parts."""


class UndoLog:
    """Rows updated since the last commit and the XOR of each record then and now, of one shard of `rows` rows, of `units` of a stripe.

    One update is kept as it came. From the second one on they are merged as they come, each unit's by themselves: a row that is updated again
    takes no more room, and at a commit what goes to one holder of parity lies together.
    """

    def __init__(self, rows: int, record_bytes: int, units: int = 1) -> None:
        self._rows, self._units = rows, units
        self._update: tuple[Tensor, Tensor] | None = None
        self._merged = [_Merged(record_bytes) for _ in range(units)]
        self._places: Tensor | None = None  # of each row in its unit's, from 1

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds, and of the table of places once there is one."""
        return sum(part.nbytes for held in self.deltas() for part in held) + (0 if self._places is None else self._places.nbytes)

    def add(self, rows: Tensor, delta: Tensor) -> None:
        """Unique rows, int64 [R], were updated; their old XOR new records, uint8 [R, B], are this log's from now on. Raises ValueError
        where several updates are to be merged whose rows do not lie unit by unit."""
        if self._update is None and not any(part.count for part in self._merged):
            self._update = rows, delta
            return
        if self._update is not None:
            self._merge(*self._update)
            self._update = None
        self._merge(rows, delta)

    def deltas(self) -> Deltas:
        """What changed since the commit: the one update there was, in its order, or a part for each unit, rows in the order in which they were first
        updated. Views: valid until the next call of another method."""
        return [self._update] if self._update is not None else [part.held for part in self._merged]

    def clear(self) -> None:
        """Forget everything. The memory that it took to merge is kept for the next time."""
        for part in self._merged:
            if part.count:
                self._places[part.held[0]] = 0
                part.count = 0
        self._update = None

    def undo(self, store: Store) -> None:
        """Apply every delta to `store` again, which takes it back, and forget it."""
        for rows, delta in self.deltas():
            store.xor(rows, delta)
        self.clear()

    def _merge(self, rows: Tensor, delta: Tensor) -> None:
        counts, _, in_order = split_by_unit(rows, self._units)
        if not in_order:
            raise ValueError("rows of an update do not lie unit by unit")
        if self._places is None:
            self._places = lazy_zeros(self._rows, dtype=np.int32)
        for part, some, change in zip(self._merged, rows.split(counts), delta.split(counts), strict=True):
            part.merge(self._places, some, change)


class _Merged:
    """Deltas of one unit's rows: `count` of them."""

    def __init__(self, record_bytes: int) -> None:
        self.count = 0
        self._rows, self._delta = torch.empty(0, dtype=torch.int64), torch.empty(0, record_bytes, dtype=torch.uint8)

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """The rows and their deltas, as views."""
        return self._rows[: self.count], self._delta[: self.count]

    def merge(self, places: Tensor, rows: Tensor, delta: Tensor) -> None:
        needed = self.count + rows.numel()
        if needed > self._rows.numel():
            held, capacity = self.held, max(needed, 2 * self._rows.numel())
            self._rows, self._delta = torch.empty(capacity, dtype=torch.int64), torch.empty(capacity, delta.shape[1], dtype=torch.uint8)
            self._rows[: self.count], self._delta[: self.count] = held
        self.count = merge_records(self._rows, self._delta, self.count, places, rows, delta)

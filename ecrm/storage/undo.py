"""What takes the updates since the last commit back, and is what parity gets when they are committed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ecrm.kernels.records import merge_records
from ecrm.kernels.unit_order import split_by_unit
from ecrm.storage.base import Store, lazy_zeros

Deltas = list[tuple[Tensor, Tensor]]
"""Local rows of a shard, int64 [R], and the XOR of each record before and after, uint8 [R, B], in parts; no row is twice in all of them."""


class UndoLog:
    """Rows updated since the last commit and the XOR of each record then and now, of one shard of `rows` rows, of `units` of a stripe.

    One update is kept as it came. From the second one on they are merged as they come, each unit's by themselves: a row that is updated again
    takes no more room, and at a commit what goes to one holder of parity lies together. An update is announced by `expect` before it is made, so
    that none is made that cannot be logged.
    """

    def __init__(self, rows: int, record_bytes: int, units: int = 1) -> None:
        self._rows, self._units = rows, units
        self._update: tuple[Tensor, Tensor] | None = None
        self._counts: list[int] | None = None  # of each unit's rows, of an update that is to be merged
        self._merged = [_Merged(record_bytes) for _ in range(units)]
        self._places: Tensor | None = None  # of each row in its unit's, from 1

    @property
    def nbytes(self) -> int:
        """Bytes of memory it has, the table of places as if all rows had been there."""
        update = sum(part.nbytes for part in self._update or ())
        return update + sum(part.nbytes for part in self._merged) + (0 if self._places is None else self._places.nbytes)

    def expect(self, rows: Tensor) -> None:
        """Make room for an update of unique rows, int64 [R], which `add` will get. Raises ValueError where their units do not ascend."""
        counts, _, in_order = split_by_unit(rows, self._units)
        if not in_order:
            raise ValueError("rows of an update do not lie unit by unit")
        if self._update is not None:
            self._merge_first()
        self._counts = counts if any(part.count for part in self._merged) else None
        if self._counts is not None:
            self._make_room(counts)

    def add(self, rows: Tensor, delta: Tensor) -> None:
        """The rows expected were updated; their old XOR new records, uint8 [R, B], are this log's from now on."""
        if self._counts is None:
            self._update = rows, delta
        else:
            self._merge(rows, delta, self._counts)

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

    def _merge_first(self) -> None:
        """A second update comes: the one there is becomes the first that is merged."""
        rows, delta = self._update
        counts = split_by_unit(rows, self._units)[0]
        if self._places is None:
            self._places = lazy_zeros(self._rows, dtype=np.int32)
        self._make_room(counts)
        self._update = None
        self._merge(rows, delta, counts)

    def _make_room(self, counts: list[int]) -> None:
        for part, more in zip(self._merged, counts, strict=True):
            part.make_room(more)

    def _merge(self, rows: Tensor, delta: Tensor, counts: list[int]) -> None:
        for part, some, change in zip(self._merged, rows.split(counts), delta.split(counts), strict=True):
            part.merge(self._places, some, change)


class _Merged:
    """Deltas of one unit's rows: `count` of them."""

    def __init__(self, record_bytes: int) -> None:
        self.count = 0
        self._rows, self._delta = torch.empty(0, dtype=torch.int64), torch.empty(0, record_bytes, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + self._delta.nbytes

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """The rows and their deltas, as views."""
        return self._rows[: self.count], self._delta[: self.count]

    def make_room(self, more: int) -> None:
        """For so many more rows than there are; a quarter more than that where there is too little."""
        if self.count + more > self._rows.numel():
            held, capacity = self.held, (self.count + more) * 5 // 4
            rows, delta = torch.empty(capacity, dtype=torch.int64), torch.empty(capacity, self._delta.shape[1], dtype=torch.uint8)
            rows[: self.count], delta[: self.count] = held
            self._rows, self._delta = rows, delta

    def merge(self, places: Tensor, rows: Tensor, delta: Tensor) -> None:
        """Rows for which there is room."""
        self.count = merge_records(self._rows, self._delta, self.count, places, rows, delta)

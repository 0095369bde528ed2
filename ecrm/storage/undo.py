"""What takes the updates since the last commit back, and is what parity gets when they are committed."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ecrm.kernels.records import RecordLog, merge_records
from ecrm.kernels.unit_order import split_by_unit
from ecrm.storage.base import Store, lazy_zeros

Deltas = list[tuple[Tensor, Tensor]]
"""Local rows of a shard, int64 [R], and the XOR of each record before and after, uint8 [R, B], in parts; no row is twice in all of them."""


class UndoLog:
    """Rows updated since the last commit and the XOR of each record then and now, of one shard of `rows` rows, of `units` of a stripe.

    One update is kept as it came. From the second one on they are merged, each unit's by themselves: a row that is updated again
    takes no more room, and at a commit what goes to one holder of parity lies together. An update is announced by `expect` before it is made, so
    that none is made that cannot be logged.
    """

    def __init__(self, rows: int, record_bytes: int, units: int = 1) -> None:
        self._rows, self._record_bytes, self._units = rows, record_bytes, units
        self._update: tuple[Tensor, Tensor] | None = None
        nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, record_bytes, dtype=torch.uint8), torch.empty(0, dtype=torch.int32)
        self._merged = [RecordLog(*nothing) for _ in range(units)]  # with places once there were two updates between two commits

    @property
    def nbytes(self) -> int:
        """Bytes of memory it has, the table of places as if all rows had been there."""
        update = sum(part.nbytes for part in self._update or ())
        merged = sum(log.rows.nbytes + log.records.nbytes for log in self._merged)
        return update + merged + self._merged[0].places.nbytes

    @property
    def merges(self) -> bool:
        """Whether the next update is merged with what there is, and not kept as it comes."""
        return self._update is not None or any(log.count for log in self._merged)

    def expect(self, rows: Tensor) -> list[tuple[slice, RecordLog]]:
        """Make room for an update of unique rows, int64 [R]: which of them the update must merge into which log.

        Where nothing `merges` there are none of these, and `keep` must get the update. Raises ValueError where units do not ascend.
        """
        counts, _, in_order = split_by_unit(rows, self._units)
        if not in_order:
            raise ValueError("rows of an update do not lie unit by unit")
        if not self.merges:
            return []
        if self._update is not None:
            self._merge_first()
        self._make_room(counts)
        ends = list(accumulate(counts))
        return [(slice(end - count, end), log) for count, end, log in zip(counts, ends, self._merged, strict=True)]

    def keep(self, rows: Tensor, delta: Tensor) -> None:
        """The first update since a commit: its rows and their old XOR new records, uint8 [R, B], are this log's from now on."""
        self._update = rows, delta

    def deltas(self) -> Deltas:
        """What changed since the commit: the one update there was, in its order, or a part for each unit, rows in the order in which they were first
        updated. Views: valid until the next call of another method."""
        return [self._update] if self._update is not None else [_held(log) for log in self._merged]

    def clear(self) -> None:
        """Forget everything. The memory that it took to merge is kept for the next time."""
        for log in self._merged:
            if log.count:
                log.places[_held(log)[0]] = 0
                log.count = 0
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
        if not self._merged[0].places.numel():
            places = lazy_zeros(self._rows, dtype=np.int32)
            for log in self._merged:
                log.places = places
        self._make_room(counts)
        self._update = None
        for log, some, change in zip(self._merged, rows.split(counts), delta.split(counts), strict=True):
            merge_records(log, some, change)

    def _make_room(self, counts: list[int]) -> None:
        """For so many more rows of each unit than there are; a quarter more than that where there is too little."""
        for log, more in zip(self._merged, counts, strict=True):
            if log.count + more > log.rows.numel():
                held, capacity = _held(log), (log.count + more) * 5 // 4
                rows, records = torch.empty(capacity, dtype=torch.int64), torch.empty(capacity, self._record_bytes, dtype=torch.uint8)
                rows[: log.count], records[: log.count] = held
                log.rows, log.records = rows, records


def _held(log: RecordLog) -> tuple[Tensor, Tensor]:
    """The rows of a log and their deltas, as views."""
    return log.rows[: log.count], log.records[: log.count]

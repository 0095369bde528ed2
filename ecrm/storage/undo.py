"""The log of updates since the last commit, for undo and for parity at a commit."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ecrm.base.allocate import CPU, Allocate, ReusableBuffer, lazy_zeros
from ecrm.device.copies import on_device, on_host
from ecrm.kernels.records import RecordLog, merge_records
from ecrm.kernels.unit_order import split_by_unit
from ecrm.storage.base import Store

Deltas = list[tuple[Tensor, Tensor]]
"""Parts of local rows, int64 [R], and old XOR new records, uint8 [R, B]; no row comes twice.

Row numbers are on the CPU, records on the device of the store.
"""


MOST_ROOM = (1 << 31) - 1
"""Most rows that a `RecordLog` can have room for."""


class UndoLog:
    """Rows updated since the last commit, and the XOR of each record at the commit and now.

    The log is of one shard of `rows` rows, with `units` data units per stripe.

    A single update is kept as given. From the second update on, updates are merged, unit by unit: a
    row updated again takes no more room, and at a commit the deltas for one holder of parity lie
    together. `expect` announces every update, so no update is made that cannot be logged.

    Deltas lie in memory from `allocate`, ready to be sent. The memory has room for all rows; the
    system hands out only the used pages. On a `device` other than the CPU all memory is real at
    once, so the log grows with use. On such a device `deltas` waits for the device once, `clear`
    never, and `expect` only if a log looks full.
    """

    def __init__(
        self,
        rows: int,
        record_bytes: int,
        units: int = 1,
        allocate: Allocate = lazy_zeros,
        device: torch.device = CPU,
    ) -> None:
        self._rows, self._record_bytes, self._units, self._allocate = (
            rows,
            record_bytes,
            units,
            allocate,
        )
        self._device, self._grows = device, device.type != "cpu"
        self._space = ReusableBuffer(
            record_bytes // 4, allocate, device, rows=0 if self._grows else rows
        )
        self._update: tuple[Tensor, Tensor] | None = None
        # a log for each unit, after the first two updates between two commits
        self._merged: list[RecordLog] = []
        # of growing logs; each begins at a multiple of 16 bytes: one compiled kernel serves all
        self._counters = torch.zeros(
            units if self._grows else 0, 2, dtype=torch.int64, device=device
        )
        self._most_space = 0  # rows
        self._most_merged = [0] * units

    @property
    def nbytes(self) -> int:
        """Bytes of memory used so far, the table of places as if used for all rows."""
        rows = 0 if self._update is None else self._update[0].nbytes
        places = self._merged[0].places.nbytes if self._merged else 0
        merged = sum(max(most, log.count) for most, log in zip(self._most_merged, self._merged))
        return (
            rows
            + self._most_space * self._record_bytes
            + merged * (8 + self._record_bytes)
            + places
        )

    def space(self, rows: int) -> Tensor:
        """Memory for the deltas of an unmerged update, float32 [rows, B / 4], holding anything.

        Valid until the commit after the update, or until the undo of the update.
        """
        self._most_space = max(self._most_space, rows)
        return self._space.of(rows)

    @property
    def merges(self) -> bool:
        """Whether the next update is merged with earlier updates, and not kept as given."""
        return self._update is not None or any(log.count for log in self._merged)

    def expect(self, rows: Tensor) -> list[tuple[slice, RecordLog]]:
        """Announce an update of unique rows, int64 [R]; returns slices of rows and a log for each.

        The caller must merge the update into the logs. If the update is not merged (`merges`), the
        list is empty, and `keep` must get the update. Raises ValueError if units do not ascend.
        """
        counts, _, in_order = split_by_unit(rows, self._units)
        if not in_order:
            raise ValueError("rows of an update do not lie unit by unit")
        if not self.merges:
            return []
        if self._update is not None:
            self._merge_first()
        for count, log in zip(counts, self._merged, strict=True):
            self._make_room(log, count)
        ends = list(accumulate(counts))
        return [
            (slice(end - count, end), log)
            for count, end, log in zip(counts, ends, self._merged, strict=True)
        ]

    def keep(self, rows: Tensor, delta: Tensor) -> None:
        """Take the first update since a commit: rows and old XOR new records, uint8 [R, B].

        The records lie in `space`; rows and records are the log's from now on.
        """
        self._update = rows, delta

    def deltas(self) -> Deltas:
        """The changes since the commit.

        A single update, if any, in the given order; several updates as a part for each unit, rows
        in the order of the first update. Views: valid until the next call of another method.
        """
        if self._update is None and self._merged:
            rows = self._settle() if self._grows else [_held(log)[0] for log in self._merged]
            return [(some, _held(log)[1]) for some, log in zip(rows, self._merged, strict=True)]
        return [
            self._update or (torch.empty(0, dtype=torch.int64), self._space.of(0).view(torch.uint8))
        ]

    def clear(self) -> None:
        """Forget everything. The memory is kept for later updates."""
        for unit, log in enumerate(self._merged):
            if log.count:
                # too large a count adds earlier rows, or row 0: all are forgotten anyway
                self._most_merged[unit] = max(self._most_merged[unit], log.count)
                log.places.index_fill_(0, _held(log)[0], 0)
                log.count = 0
        if self._merged:
            self._counters.zero_()
        self._update = None

    def undo(self, store: Store) -> None:
        """Undo every delta by applying the delta to `store` again, and forget the deltas."""
        for rows, delta in self.deltas():
            store.xor(rows, delta)
        self.clear()

    def _merge_first(self) -> None:
        """Before a second update: merge the first update into the logs."""
        assert self._update is not None
        rows, delta = self._update
        counts = split_by_unit(rows, self._units)[0]
        if not self._merged:
            places = self._zeros(self._rows, dtype=np.int32)
            self._merged = [self._new_log(unit, places) for unit in range(self._units)]
        self._update = None
        for log, some, change in zip(
            self._merged, rows.split(counts), delta.split(counts), strict=True
        ):
            self._make_room(log, len(some))
            merge_records(log, on_device(self._device, some), change)

    def _settle(self) -> list[Tensor]:
        """Make all counts exact, and return the rows of each log, on the CPU, in one copy."""
        ends = list(accumulate((log.count for log in self._merged), initial=self._counters.numel()))
        parts = [self._counters.flatten(), *(_held(log)[0] for log in self._merged)]
        (copy,) = on_host(torch.cat(parts))
        for log, count in zip(self._merged, copy[: ends[0] : 2].tolist(), strict=True):
            log.count = count
        return [copy[end : end + log.count] for end, log in zip(ends, self._merged)]

    def _new_log(self, unit: int, places: Tensor) -> RecordLog:
        """A log with room for twice a unit's rows: all rows, and an update of all rows.

        A kernel cannot tell ahead which rows are logged already. A growing log begins without room.
        """
        rows = len(range(unit, self._rows, self._units))
        room = 0 if self._grows else min(2 * rows, MOST_ROOM)
        counter = self._counters[unit, :1] if self._grows else None
        return RecordLog(*self._room(room), places, counter=counter)

    def _room(self, rows: int) -> tuple[Tensor, Tensor]:
        """Memory for a log of `rows` rows: row numbers and records."""
        return self._zeros(rows, dtype=np.int64), self._allocate(
            rows, self._record_bytes, dtype=np.uint8
        )

    @property
    def _zeros(self) -> Allocate:
        """The allocator of memory that is not sent."""
        return self._allocate if self._grows else lazy_zeros

    def _make_room(self, log: RecordLog, more: int) -> None:
        """Make room in a log for `more` rows."""
        if log.count + more <= len(log.rows) or not self._grows:
            return
        if log.count:  # an upper bound
            self._settle()
        needed = log.count + more
        if needed <= len(log.rows):
            return
        rows, records = self._room(min(2 * needed, MOST_ROOM))
        rows[: log.count], records[: log.count] = _held(log)
        log.rows, log.records = rows, records


def _held(log: RecordLog) -> tuple[Tensor, Tensor]:
    """The rows and the deltas of a log, as views."""
    return log.rows[: log.count], log.records[: log.count]

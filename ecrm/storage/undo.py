"""The log that takes updates since the last commit back, and that parity gets at a commit."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ecrm.base.allocate import CPU, Allocate, ReusableBuffer, lazy_zeros
from ecrm.kernels.records import RecordLog, merge_records
from ecrm.kernels.unit_order import split_by_unit
from ecrm.storage.base import Store
from ecrm.transport.gpu_copies import on_device, on_host

Deltas = list[tuple[Tensor, Tensor]]
"""Parts of local rows, int64 [R], and old XOR new records, uint8 [R, B]; no row comes twice.

Row numbers are on the CPU, records on the device of their store.
"""


MOST_ROOM = (1 << 31) - 1
"""Of a `RecordLog`."""


class UndoLog:
    """Rows updated since the last commit, and the XOR of each record then and now.

    Of one shard of `rows` rows, of `units` of a stripe.

    One update is kept as it came. From the second one on they are merged, each unit's by
    themselves: a row that is updated again takes no more room, and at a commit what goes to one
    holder of parity lies together. An update is announced by `expect` before it is made, so that
    none is made that cannot be logged.

    Deltas lie where they are sent from: in memory from `allocate`, which has room for all rows, of
    which the system hands out what is used. On a `device` other than the CPU all memory is real at
    once: there they grow. There `deltas` waits for the device once, `clear` never, and `expect`
    only where a log looks full.
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
        # a log for each unit once there were two updates between two commits
        self._merged: list[RecordLog] = []
        # of the logs that grow; each begins at 16 bytes, so that one compiled kernel serves all
        self._counters = torch.zeros(
            units if self._grows else 0, 2, dtype=torch.int64, device=device
        )
        self._most_space = 0  # rows
        self._most_merged = [0] * units

    @property
    def nbytes(self) -> int:
        """Bytes of memory it has come to use, the table of places as if all rows had been there."""
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
        """Memory for the deltas of an update that is not merged, float32 [rows, B / 4].

        It holds anything, and is valid until the commit after the update, or until that is undone.
        """
        self._most_space = max(self._most_space, rows)
        return self._space.of(rows)

    @property
    def merges(self) -> bool:
        """Whether the next update is merged with what there is, and not kept as it comes."""
        return self._update is not None or any(log.count for log in self._merged)

    def expect(self, rows: Tensor) -> list[tuple[slice, RecordLog]]:
        """An update of unique rows, int64 [R], comes: which of them it must merge into which log.

        Where nothing `merges` there are none of these, and `keep` must get the update. Raises
        ValueError where units do not ascend.
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

        The records lie in `space`; both are this log's from now on.
        """
        self._update = rows, delta

    def deltas(self) -> Deltas:
        """What changed since the commit.

        The one update there was, if any, in its order; of several a part for each unit, rows in the
        order of their first update. Views: valid until the next call of another method.
        """
        if self._update is None and self._merged:
            rows = self._settle() if self._grows else [_held(log)[0] for log in self._merged]
            return [(some, _held(log)[1]) for some, log in zip(rows, self._merged, strict=True)]
        return [
            self._update or (torch.empty(0, dtype=torch.int64), self._space.of(0).view(torch.uint8))
        ]

    def clear(self) -> None:
        """Forget everything. The memory that it took is kept for the next time."""
        for unit, log in enumerate(self._merged):
            if log.count:
                # a count that is too large adds rows of before, or row 0: all are forgotten anyway
                self._most_merged[unit] = max(self._most_merged[unit], log.count)
                log.places.index_fill_(0, _held(log)[0], 0)
                log.count = 0
        if self._merged:
            self._counters.zero_()
        self._update = None

    def undo(self, store: Store) -> None:
        """Apply every delta to `store` again, which takes it back, and forget it."""
        for rows, delta in self.deltas():
            store.xor(rows, delta)
        self.clear()

    def _merge_first(self) -> None:
        """A second update comes: the one there is becomes the first that is merged."""
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
        """A log with room for twice a unit's rows: all of them, and an update of all of them.

        A kernel cannot tell which are there already. A log that grows begins without room.
        """
        rows = len(range(unit, self._rows, self._units))
        room = 0 if self._grows else min(2 * rows, MOST_ROOM)
        counter = self._counters[unit, :1] if self._grows else None
        return RecordLog(*self._room(room), places, counter=counter)

    def _room(self, rows: int) -> tuple[Tensor, Tensor]:
        """Memory of a log of so many rows."""
        return self._zeros(rows, dtype=np.int64), self._allocate(
            rows, self._record_bytes, dtype=np.uint8
        )

    @property
    def _zeros(self) -> Allocate:
        """Of memory that is not sent."""
        return self._allocate if self._grows else lazy_zeros

    def _make_room(self, log: RecordLog, more: int) -> None:
        """See that `more` rows can be appended to a log."""
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
    """The rows of a log and their deltas, as views."""
    return log.rows[: log.count], log.records[: log.count]

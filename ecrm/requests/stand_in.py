"""What stands in for lost shards: rows as they were last seen, and gradients kept for later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ecrm.base.allocate import lazy_zeros
from ecrm.kernels.records import scatter_records
from ecrm.placement.stripes import RowLayout

KeptPart = tuple[int, Tensor, Tensor]
"""Of one slot and shard: (row space, unique local rows int64 [R], summed gradients [R, dim])."""


@dataclass(frozen=True)
class Kept:
    """What one slot's step has for one shard that is away."""

    step: int
    slot: int
    parts: Sequence[KeptPart]


@dataclass
class Served:
    """Rows given out in place of a shard's own, one per slot and step that asked.

    `seen` were last seen so; `initial` were never seen.
    """

    seen: int = 0
    initial: int = 0


class StandIn:
    """One rank's part. `away`, set by the protection, are shards that do not answer.

    `initial(space, rows)` gives initial values, float32 [R, dim]; at most `entries` rows of each
    row space are remembered. What is kept and counted since the commit goes again with `undo`.
    """

    def __init__(
        self, layouts: Sequence[RowLayout], initial: Callable[[int, Tensor], Tensor], entries: int
    ) -> None:
        self.away: frozenset[int] = frozenset()
        self._layouts, self._initial, self._entries = layouts, initial, entries
        self._last_seen: dict[int, LastSeen] = {}
        self._kept: dict[int, list[Kept]] = {}
        self._served: dict[int, Served] = {}
        self._served_at_commit: dict[int, tuple[int, int]] = {}

    @property
    def memory_bytes(self) -> int:
        """Of the rows remembered."""
        return sum(cache.memory_bytes for cache in self._last_seen.values())

    @property
    def kept_bytes(self) -> int:
        """Of the gradients kept."""
        every = (part for kept in self._kept.values() for entry in kept for part in entry.parts)
        return sum(rows.nbytes + gradients.nbytes for _, rows, gradients in every)

    def saw(self, space: int, rows: Tensor, values: Tensor, picked: Tensor | None = None) -> None:
        """Remember rows of a row space, unique int64 [R], that their shard has sent.

        `values`, float32 [R, dim], are theirs, or `values[picked]`, int64 [R].
        """
        if not rows.numel():
            return
        if space not in self._last_seen:
            self._last_seen[space] = LastSeen(
                max(1, min(self._entries, self._layouts[space].rows)), values.shape[1]
            )
        self._last_seen[space].put(rows, values, picked)

    def values(self, shard: int, space: int, rows: Tensor, count: bool = True) -> Tensor:
        """Rows of a shard that is away, as last seen or initial, float32 [R, dim].

        With `count` they count as `served`.
        """
        served = self._served.setdefault(shard, Served()) if count else Served()
        if space not in self._last_seen:
            served.initial += rows.numel()
            return self._initial(space, rows)
        known, values = self._last_seen[space].get(rows)
        new = (~known).nonzero().squeeze(1)
        served.seen, served.initial = (
            served.seen + rows.numel() - new.numel(),
            served.initial + new.numel(),
        )
        if new.numel():
            values[new] = self._initial(space, rows[new])
        return values

    def keep(self, shard: int, step: int, slot: int, parts: Sequence[KeptPart]) -> None:
        """Keep what a slot's step has for a shard that is away, also if that is nothing."""
        self._kept.setdefault(shard, []).append(Kept(step, slot, parts))

    def kept(self, shard: int) -> list[Kept]:
        """What is kept for a shard, in the order of steps."""
        return self._kept.get(shard, [])

    def served(self, shard: int) -> Served:
        return self._served.get(shard, Served())

    def forget(self, shards: Iterable[int]) -> None:
        """These shards are whole and have what was kept for them."""
        for shard in shards:
            self._kept.pop(shard, None)
            self._served.pop(shard, None)

    def committed(self) -> None:
        """What was counted can no longer be taken back."""
        self._served_at_commit = {
            shard: (served.seen, served.initial) for shard, served in self._served.items()
        }

    def undo(self, committed: int) -> None:
        """Steps from `committed` on have not been."""
        self._kept = {
            shard: [entry for entry in kept if entry.step < committed]
            for shard, kept in self._kept.items()
        }
        self._served = {shard: Served(*counts) for shard, counts in self._served_at_commit.items()}


class LastSeen:
    """A direct-mapped cache: row r has place r mod `entries`; the last row seen displaces others.

    With as many entries as rows nothing is ever displaced. Arguments named `rows` are unique int64
    row numbers [R], values are float32 [R, dim].
    """

    def __init__(self, entries: int, dim: int) -> None:
        self._rows = lazy_zeros(entries, dtype=np.int64)  # one more than the row held; 0: none
        self._values = lazy_zeros(entries, dim)

    @property
    def memory_bytes(self) -> int:
        """Bytes once every place has been used."""
        return self._rows.nbytes + self._values.nbytes

    def put(self, rows: Tensor, values: Tensor, picked: Tensor | None = None) -> None:
        """Remember rows with `values`, or `values[picked]`, int64 [R].

        Of several rows with one place any one stays.
        """
        places, marks = rows % self._rows.numel(), rows + 1
        self._rows[places] = marks
        # of each place one row: rows and values must not be mixed up
        stay = (self._rows[places] == marks).nonzero().squeeze(1)
        scatter_records(
            self._values,
            (),
            places[stay],
            values.view(torch.uint8),
            picked=stay if picked is None else picked[stay],
        )

    def get(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(which rows are held, bool [R]; their values, any value for the others)."""
        places = rows % self._rows.numel()
        return self._rows[places] == rows + 1, self._values.index_select(0, places)

"""The stand-in for lost shards: rows as last seen, and gradients kept for later."""

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
    """The gradients of a slot's step for a shard that is away."""

    step: int
    slot: int
    parts: Sequence[KeptPart]


@dataclass
class Served:
    """Number of rows given in place of a shard's own, counted per asking slot and step.

    `seen`: rows as last seen; `initial`: rows with initial values, not in the cache.
    """

    seen: int = 0
    initial: int = 0


class StandIn:
    """One rank's part. `away`, set by the protection, are shards without answers.

    `initial(space, rows)` gives initial values, float32 [R, dim]; at most `entries` rows of every
    row space are remembered. `undo` drops gradients and counts since the commit, not rows.
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
        """Bytes of the cache of rows."""
        return sum(cache.memory_bytes for cache in self._last_seen.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes of the gradients kept, row numbers included."""
        every = (part for kept in self._kept.values() for entry in kept for part in entry.parts)
        return sum(rows.nbytes + gradients.nbytes for _, rows, gradients in every)

    def saw(self, space: int, rows: Tensor, values: Tensor, picked: Tensor | None = None) -> None:
        """Remember rows of a row space, unique int64 [R], as sent by a shard.

        The rows' values are `values`, float32 [R, dim], or `values[picked]`, `picked` int64 [R].
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

        With `count` the rows count as `served`.
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
        """Keep the gradients of a slot's step for a shard that is away; `parts` may be empty."""
        self._kept.setdefault(shard, []).append(Kept(step, slot, parts))

    def kept(self, shard: int) -> list[Kept]:
        """The gradients kept for a shard, in the order of steps."""
        return self._kept.get(shard, [])

    def served(self, shard: int) -> Served:
        return self._served.get(shard, Served())

    def forget(self, shards: Iterable[int]) -> None:
        """Drop gradients and counts of `shards`: now whole, and given all kept gradients."""
        for shard in shards:
            self._kept.pop(shard, None)
            self._served.pop(shard, None)

    def committed(self) -> None:
        """Commit the counts, not to be taken back any more."""
        self._served_at_commit = {
            shard: (served.seen, served.initial) for shard, served in self._served.items()
        }

    def undo(self, committed: int) -> None:
        """Drop gradients of steps from `committed` on, and counts since the commit."""
        self._kept = {
            shard: [entry for entry in kept if entry.step < committed]
            for shard, kept in self._kept.items()
        }
        self._served = {shard: Served(*counts) for shard, counts in self._served_at_commit.items()}


class LastSeen:
    """A direct-mapped cache: row r has place r mod `entries`; a new row displaces the old row.

    With as many entries as rows no row is ever displaced. Arguments named `rows` are unique int64
    row numbers [R], values are float32 [R, dim].
    """

    def __init__(self, entries: int, dim: int) -> None:
        self._rows = lazy_zeros(entries, dtype=np.int64)  # number of the row held, plus 1; 0: empty
        self._values = lazy_zeros(entries, dim)

    @property
    def memory_bytes(self) -> int:
        """Bytes once every place has been used."""
        return self._rows.nbytes + self._values.nbytes

    def put(self, rows: Tensor, values: Tensor, picked: Tensor | None = None) -> None:
        """Remember rows with `values`, or `values[picked]`, int64 [R].

        Of several rows for the same place any may stay.
        """
        places, marks = rows % self._rows.numel(), rows + 1
        self._rows[places] = marks
        # a single row per place: a row must not get the values of a different row
        stay = (self._rows[places] == marks).nonzero().squeeze(1)
        scatter_records(
            self._values,
            (),
            places[stay],
            values.view(torch.uint8),
            picked=stay if picked is None else picked[stay],
        )

    def get(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(whether a row is held, bool [R]; values, anything for rows not held)."""
        places = rows % self._rows.numel()
        return self._rows[places] == rows + 1, self._values.index_select(0, places)

"""Restoring the rows of a lost shard on the new host from the durable tier, some per round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from ecrm.placement.stripes import RowLayout
from ecrm.storage.hosted import HostedShard

Piece = tuple[int, Tensor, Tensor]
"""(row space, local rows int64 [R], records of the rows uint8 [R, B])."""

PIECES_PER_ROUND = 4
"""Most pieces of rows read, or parts of files checked, per round: a few megabytes each."""


class ShardReader(Protocol):
    """One shard's rows in the durable tier.

    `step` is the number of steps in the rows, `None` until `check` has ended. `refused` has the
    reasons for not using newer rows. `begins`: whether the run began with the rows, so only their
    values count.
    """

    step: int | None
    refused: list[str]
    begins: bool

    def check(self) -> Iterator[None]:
        """Find the newest usable rows; yields after each part of the work."""

    def pieces(self) -> Iterator[Piece]:
        """The shard's rows; of a repeated row the first record counts.

        Rows never yielded have records of zeros.
        """


class DurableRows(Protocol):
    """The durable tier, as seen by a rank alone."""

    def read(self, shard: int, layouts: Sequence[RowLayout]) -> ShardReader:
        """A reader of one shard's rows."""


class Restoring:
    """Fills in the missing rows of one shard, `hosted` by row space.

    Restored rows count from the commit on.
    """

    def __init__(self, reader: ShardReader, hosted: Mapping[int, HostedShard]) -> None:
        self.reader, self._hosted = reader, hosted
        self._check = reader.check()
        self.restart()

    def restart(self) -> None:
        """Rows restored since the commit are missing again: begin with the first piece."""
        self._pieces: Iterator[Piece] | None = None
        self._rest: Piece | None = None

    @property
    def left(self) -> int:
        """Rows still missing."""
        return sum(hosted.missing_rows for hosted in self._hosted.values())

    def go_on(self, budget: int) -> None:
        """Restore up to `budget` rows of the durable tier, from PIECES_PER_ROUND pieces at most.

        After the last piece, all rows still missing become zeros.
        """
        for _ in range(PIECES_PER_ROUND):
            if not budget:
                break
            if self.reader.step is None:
                next(self._check, None)
                continue
            if not self._next_piece():
                for hosted in self._hosted.values():
                    hosted.restore_rest()
                break
            assert self._rest is not None
            space, local, records = self._rest
            now, self._rest = local[:budget], (space, local[budget:], records[budget:])
            hosted, some = self._hosted[space], records[:budget]
            as_here = hosted.store.begun if self.reader.begins else hosted.store.with_padding
            hosted.restore(now, as_here(some))
            budget -= now.numel()

    def _next_piece(self) -> bool:
        """Return whether a piece is left; `_rest` is then a piece of missing rows alone."""
        if self._pieces is None:
            self._pieces = self.reader.pieces()
        if self._rest is None or not self._rest[1].numel():
            piece = next(self._pieces, None)
            if piece is None:
                return False
            space, local, records = piece
            missing = self._hosted[space].missing
            wanted = missing.among(local) if missing is not None else local < 0
            here = wanted.nonzero().squeeze(1)
            self._rest = space, local[here], records.index_select(0, here)
        return True

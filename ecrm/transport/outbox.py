"""Messages to many ranks, kept as a few arrays.

With a thousand ranks a slot asks each for some twenty rows. An object for each rank costs more
than the rows. So the parts for all ranks stay together in a `Spread`, until a transport packs the
messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ecrm.transport.message import Part, Picked

MANY = 32
"""The number of groups, and of ranks, from which arrays take less time than objects.

Arrays take 0.3 ms for the messages of a slot to few ranks, objects 0.01 ms for each rank.
"""


@dataclass(frozen=True)
class Spread:
    """A group of a head and a tensor for each of some ranks.

    Legend: G groups, H words of a head.

    Args:
        ranks: The receiver of each group, int64 [G]; may repeat.
        heads: The heads, int64 [G, H].
        counts: The elements, or picked rows, of each group's tensor, int64 [G].
        payload: The tensors of all groups one after the other: a tensor of one dimension, or
            `Picked` rows.
    """

    ranks: np.ndarray
    heads: np.ndarray
    counts: np.ndarray
    payload: Tensor | Picked

    def groups(self) -> Iterator[tuple[int, tuple[int, ...], Tensor | Picked]]:
        """The receiver, the head and the tensor of every group."""
        counts = self.counts.tolist()
        if isinstance(self.payload, Picked):
            source = self.payload.source
            parts = [Picked(source, rows) for rows in self.payload.rows.split(counts)]
        else:
            parts = list(self.payload.split(counts))
        return zip(self.ranks.tolist(), map(tuple, self.heads.tolist()), parts, strict=True)


def to_all(ranks: np.ndarray, head: tuple[int, ...]) -> Spread:
    """The same head, with no elements, to all of `ranks`, int64 [G]."""
    heads = np.tile(np.array(head, np.int64), (len(ranks), 1))
    return Spread(ranks, heads, np.zeros(len(ranks), np.int64), torch.empty(0))


class Outbox(Mapping[int, Sequence[Part]]):
    """Messages by receiver: for each rank the groups of all spreads in order, then single parts.

    `spreads` and `single` are for a transport that packs without an object for a rank. Every other
    reader gets lists of parts, made at the first reading. A spread of fewer than MANY groups
    becomes single parts at once.
    """

    def __init__(self, spreads: Iterable[Spread] = ()) -> None:
        self.spreads: list[Spread] = []
        self.single: dict[int, list[Part]] = {}
        for spread in spreads:
            self.spread(spread)

    @classmethod
    def of(cls, messages: Mapping[int, Sequence[Part]]) -> Outbox:
        """Messages without spreads."""
        outbox = cls()
        outbox.single = {rank: list(parts) for rank, parts in messages.items()}
        return outbox

    def spread(self, spread: Spread) -> None:
        """Add the groups of a spread."""
        if len(spread.ranks) < MANY:
            for rank, head, part in spread.groups():
                self.add(rank, head, part)
            return
        self.spreads.append(spread)
        self.__dict__.pop("_lists", None)

    def add(self, rank: int, *parts: Part) -> None:
        """Add parts to a rank's message."""
        self.single.setdefault(rank, []).extend(parts)
        self.__dict__.pop("_lists", None)

    def include(self, other: Outbox) -> None:
        """Add all messages of `other`."""
        self.spreads += other.spreads
        for rank, parts in other.single.items():
            self.add(rank, *parts)
        self.__dict__.pop("_lists", None)

    def part_counts(self) -> dict[int, int]:
        """The parts of each rank's message, ranks ascending."""
        groups = [spread.ranks for spread in self.spreads]
        ranks, counts = np.unique(np.concatenate([[], *groups]), return_counts=True)
        found = dict(zip(map(int, ranks), (2 * counts).tolist()))
        for rank, parts in self.single.items():
            found[rank] = found.get(rank, 0) + len(parts)
        return dict(sorted(found.items()))

    @property
    def ranks(self) -> np.ndarray:
        """The receivers, ascending, int64."""
        found = [spread.ranks for spread in self.spreads]
        return np.unique(np.concatenate([*found, np.array(list(self.single), np.int64)]))

    def ranks_without(self, place_of: np.ndarray) -> list[int]:
        """The receivers, ascending, that have no place, `place_of[rank]` below 0, or no number."""
        strangers = {
            rank for rank in self.single if not 0 <= rank < len(place_of) or place_of[rank] < 0
        }
        for spread in self.spreads:
            inside = (spread.ranks >= 0) & (spread.ranks < len(place_of))
            there = place_of[np.where(inside, spread.ranks, 0)] >= 0
            strangers.update(spread.ranks[~(inside & there)].tolist())
        return sorted(strangers)

    @cached_property
    def _lists(self) -> dict[int, list[Part]]:
        lists: dict[int, list[Part]] = {}
        for spread in self.spreads:
            for rank, head, part in spread.groups():
                lists.setdefault(rank, []).extend((head, part))
        for rank, parts in self.single.items():
            lists.setdefault(rank, []).extend(parts)
        return lists

    def __getitem__(self, rank: int) -> Sequence[Part]:
        return self._lists[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._lists)

    def __len__(self) -> int:
        return len(self._lists)

"""Received messages, described in one table until somebody asks for an object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch

from ecrm.kernels.messages import read_messages
from ecrm.kernels.messages.codes import HEAD, PICKED
from ecrm.transport import wire
from ecrm.transport.message import Received

MESSAGE, CODE, LENGTH, WORDS, PAYLOAD = 0, 1, 2, 3, 7
"""Columns of the table, as `read_messages` says; a head has its first four words from WORDS on."""

SHORT_BYTES = 4096
"""Messages shorter on average are copied together: numpy tells an address in a microsecond."""

_FLOATS, _INTEGERS = wire.CODE_OF_DTYPE[torch.float32], wire.CODE_OF_DTYPE[torch.int64]


@dataclass(frozen=True)
class Packed:
    """Messages of an exchange as they came.

    Args:
        ranks: The senders, ascending.
        messages: The packed part of each message, uint8.
        apart: The memory of each message that travelled apart, uint8.
        memory_of: The memory of a rank that this rank can read, uint8, or `None`.
    """

    ranks: list[int]
    messages: list[np.ndarray]
    apart: list[list[np.ndarray]]
    memory_of: Callable[[int], np.ndarray | None]

    @cached_property
    def _lists(self) -> dict[int, list[Received]]:
        return {}

    def parts(self, place: int) -> list[Received]:
        """All parts of a message. Raises ValueError for bytes that no rank packed."""
        if place not in self._lists:
            self._lists[place] = wire.unpack(
                self.messages[place], self.apart[place], self.memory_of(self.ranks[place])
            )
        return self._lists[place]

    @cached_property
    def _read(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The table, and the memory of its addresses if that is a copy."""
        sizes = np.fromiter(map(len, self.messages), np.int64, len(self.messages))
        if sizes.sum() < SHORT_BYTES * len(sizes):
            # half the time of np.concatenate; never of 0 bytes, which frombuffer may refuse
            run = b"".join([*cast(list[bytes], self.messages), bytes(8)])
            memory = np.frombuffer(run, np.uint8)
            addresses = memory.ctypes.data + sizes.cumsum() - sizes
        else:
            memory = None
            addresses = np.array([message.ctypes.data for message in self.messages], np.int64)
        return read_messages(addresses, sizes, [dtype.itemsize for dtype in wire.DTYPES]), memory

    @property
    def table(self) -> np.ndarray:
        """All parts, as `read_messages` says; the addresses are good while this object is.

        Raises ValueError for bytes that no rank packed.
        """
        return self._read[0]

    @cached_property
    def starts(self) -> np.ndarray:
        """The first part of each message in the table, and the number of all parts."""
        counts = np.bincount(self.table[:, MESSAGE], minlength=len(self.messages))
        return np.concatenate([[0], counts.cumsum()])


@dataclass(frozen=True)
class Rows:
    """Where rows of floats lie, group by group.

    Legend: n groups.

    Args:
        sources: The address of each group's matrix, int64 [n].
        heights: The rows of each matrix, int64 [n].
        widths: The floats of a row, int64 [n].
        picked: The address of each group's picked row numbers, int64, or 0 for all rows.
        kept: The memory at the addresses; good while `kept` is.
    """

    sources: np.ndarray
    heights: np.ndarray
    widths: np.ndarray
    picked: np.ndarray
    kept: tuple[object, ...]


@dataclass(frozen=True)
class Numbers:
    """Where int64 numbers lie, group by group.

    Legend: n groups.

    Args:
        addresses: The address of each group's numbers, int64 [n].
        counts: The numbers of each group, int64 [n].
        kept: The memory at the addresses; good while `kept` is.
    """

    addresses: np.ndarray
    counts: np.ndarray
    kept: object


class Inbox(Mapping[int, list[Received]]):
    """The parts that came from each rank: of all its message, or a run of its message's parts."""

    def __init__(self, packed: Packed, runs: tuple[np.ndarray, np.ndarray] | None = None) -> None:
        """`runs` are, of each message, the first part and the part after the last, in the table."""
        self._packed, self._runs = packed, runs

    def __getitem__(self, rank: int) -> list[Received]:
        return self._parts(self._places[rank])

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @cached_property
    def _places(self) -> dict[int, int]:
        """The place of each rank that sent something."""
        if self._runs is None:
            return {
                rank: place
                for place, rank in enumerate(self._packed.ranks)
                if self._packed.messages[place].size
            }
        there = (self._runs[1] > self._runs[0]).nonzero()[0].tolist()
        return {self._packed.ranks[place]: place for place in there}

    def _parts(self, place: int) -> list[Received]:
        parts = self._packed.parts(place)
        if self._runs is None:
            return parts
        first, last = (int(run[place] - self._packed.starts[place]) for run in self._runs)
        return parts[first:last]

    def divided(self) -> tuple[Inbox, Inbox]:
        """The parts attached to each message, and the rest: the first group tells how many."""
        table, starts = self._packed.table, self._packed.starts
        first = starts[:-1] + 2 * (starts[1:] > starts[:-1])
        counts = np.zeros(len(first), np.int64)
        sent = first > starts[:-1]
        counts[sent] = table[starts[:-1][sent], WORDS]
        ends = first + counts
        return Inbox(self._packed, (first, ends)), Inbox(self._packed, (ends, starts[1:]))

    def groups(self) -> Groups:
        """All parts as groups of a head and a tensor. Raises ValueError for other parts."""
        starts = self._packed.starts
        first, last = (starts[:-1], starts[1:]) if self._runs is None else self._runs
        counts = (last - first) // 2
        ahead = counts.cumsum() - counts
        heads = (first - 2 * ahead).repeat(counts) + 2 * np.arange(counts.sum())
        if (last - first).sum() != 2 * len(heads) or (
            self._packed.table[heads, CODE] != HEAD
        ).any():
            raise ValueError("parts came that are no groups of a head and a tensor")
        return Groups(self._packed, heads)


class Groups(Mapping[int, list[Received]]):
    """Groups of a head and a tensor, in the order of messages: (head, tensor, ...) of each rank.

    Legend: G groups.
    """

    def __init__(self, packed: Packed, heads: np.ndarray) -> None:
        """`heads` are the heads' places in the table, ascending, int64 [G]."""
        self._packed, self._heads = packed, heads

    @property
    def words(self) -> np.ndarray:
        """The first four words of each head, int64 [G, 4]; 0 for missing words."""
        return self._packed.table[self._heads, WORDS : WORDS + 4]

    @property
    def senders(self) -> np.ndarray:
        """The rank that sent each group, int64 [G]."""
        messages = self._packed.table[self._heads, MESSAGE]
        return np.asarray(np.array(self._packed.ranks, np.int64)[messages])

    @property
    def lengths(self) -> np.ndarray:
        """The elements of each group's tensor, int64 [G]."""
        return np.asarray(self._packed.table[self._heads + 1, LENGTH])

    def numbers(self) -> Numbers | None:
        """Where the tensors lie; `None` if a tensor lies elsewhere or has another dtype."""
        parts = self._packed.table[self._heads + 1]
        if (parts[:, CODE] != _INTEGERS).any():
            return None
        return Numbers(parts[:, PAYLOAD], parts[:, LENGTH], self._packed)

    def among(self, chosen: np.ndarray) -> Groups:
        """The chosen groups, bool [G]."""
        return self if chosen.all() else Groups(self._packed, self._heads[chosen])

    def rows(self, chosen: np.ndarray, counts: np.ndarray) -> Rows | None:
        """Where the float32 rows in some groups lie; `counts` rows are expected, int64 [n].

        `None` if a tensor lies elsewhere or has another dtype: then objects tell. Raises ValueError
        for a place outside of the memory of a rank.
        """
        parts = self._packed.table[self._heads[chosen] + 1]
        codes, lengths = parts[:, CODE], parts[:, LENGTH]
        picked = codes == _FLOATS + PICKED
        if not (picked | (codes == _FLOATS)).all():
            return None
        here = parts[:, PAYLOAD]
        came = np.where(picked, parts[:, WORDS + 2], counts)
        width = np.where(picked, parts[:, WORDS + 1], lengths // counts)
        source, memories = here.copy(), list[np.ndarray]()
        if picked.any():
            source[picked], memories = self._shared(parts[picked])
        fits = (came == counts) & (width > 0)
        fits &= lengths == width * np.where(picked, lengths // width.clip(1), counts)
        if not fits.all():
            raise ValueError(
                f"{int(lengths[~fits][0])} floats came for {int(counts[~fits][0])} rows"
            )
        rows = np.where(picked, here, 0)
        return Rows(source, lengths // width, width, rows, (self._packed, memories))

    def _shared(self, parts: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """The address of each part in the memory of the sender, and the memories."""
        place = np.zeros((len(self._packed.ranks), 2), np.int64)
        memories = []
        for sender in np.unique(parts[:, MESSAGE]).tolist():
            memory = self._packed.memory_of(self._packed.ranks[sender])
            if memory is not None:
                place[sender] = memory.ctypes.data, memory.nbytes
                memories.append(memory)
        begin, size = place[parts[:, MESSAGE]].T
        offset, lengths = parts[:, WORDS], parts[:, LENGTH]
        outside = (offset < 0) | (offset > size - 4 * lengths)
        if outside.any():
            first = int(outside.argmax())
            raise ValueError(
                f"packed tensors: {lengths[first]} floats shared at byte {offset[first]}, "
                f"{size[first]} bytes can be read"
            )
        return np.asarray(begin + offset), memories

    @cached_property
    def _lists(self) -> dict[int, list[Received]]:
        lists: dict[int, list[Received]] = {}
        messages = self._packed.table[self._heads, MESSAGE]
        first = (self._heads - self._packed.starts[messages]).tolist()
        for place, at in zip(messages.tolist(), first):
            of_rank = lists.setdefault(self._packed.ranks[place], [])
            of_rank += self._packed.parts(place)[at : at + 2]
        return lists

    def __getitem__(self, rank: int) -> list[Received]:
        return self._lists[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._lists)

    def __bool__(self) -> bool:
        return len(self._heads) > 0

    def __len__(self) -> int:
        return len(np.unique(self._packed.table[self._heads, MESSAGE]))

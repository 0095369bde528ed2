"""Messages packed for the carriers of bytes: the part common to MPI and to links.

A transport of this kind carries, per call, a packed message and some memory apart from each rank to
each rank. Ranks of a host share memory, and send places in this memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from ecrm.transport import outbox, wire
from ecrm.transport.base import WORD_BITS, Transport
from ecrm.transport.inbox import Inbox, Packed
from ecrm.transport.message import Part, Picked, Received
from ecrm.transport.outbox import Outbox, Spread
from ecrm.transport.shared_memory import SharedMemory

KIND_NAMES = ("exchange", "share")
EXCHANGE, SHARE = range(len(KIND_NAMES))
MOST_APART = 6
"""The most tensors of a message sent from where they lie."""

# Bits of an agreement, to be combined among all live ranks with AND. Bits 1 to 3 are free.
FLAG = 1  # this rank's answer is True
WORD_AT = 4  # a word begins here, its complement follows: with equal words both survive AND
WORD_MASK = (1 << WORD_BITS) - 1
NO_WORD = (1 << 2 * WORD_BITS) - 1  # AND with it changes no other rank's word


def bits_of(flag: bool, word: int | None) -> int:
    """The bits of a rank in an agreement."""
    bits = NO_WORD if word is None else word | (word ^ WORD_MASK) << WORD_BITS
    return (FLAG if flag else 0) | bits << WORD_AT


def meaning_of(answer: int) -> tuple[bool, bool]:
    """The results of `agree_alike`, from the bits of all ranks combined with AND."""
    said = answer >> WORD_AT
    return bool(answer & FLAG), (said | said >> WORD_BITS) & WORD_MASK == WORD_MASK


class PackedTransport(Transport):
    """A transport that packs all parts for a rank into one message, as `wire` does.

    Subclasses carry the messages: `_deliver`.
    """

    def __init__(self, ranks: int) -> None:
        """`ranks` is the number of all ranks."""
        self._ranks = ranks
        self._scratch = np.empty(0, np.uint8)
        self._shared_memory = SharedMemory(ranks)

    @abstractmethod
    def _deliver(
        self, kind: int, packed: list[np.ndarray], apart: list[list[np.ndarray]]
    ) -> Mapping[int, tuple[np.ndarray, list[np.ndarray]]]:
        """Send `packed[i]` and `apart[i]` to live rank i; return the messages of all live ranks.

        Messages are uint8, by sender in ascending order: the packed part, and the memory apart.
        """

    @property
    def shared_memory(self) -> SharedMemory:  # type: ignore[override]
        """As in `Transport`."""
        return self._shared_memory

    def allocate_shared(self, *shape: int, dtype: type = np.float32) -> Tensor:
        """As in `Transport`."""
        return self._shared_memory.allocate(*shape, dtype=dtype)

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> Mapping[int, list[Received]]:
        """As in `Transport`."""
        messages = outgoing if isinstance(outgoing, Outbox) else Outbox.of(outgoing)
        place_of = np.full(self._ranks, -1)
        place_of[np.array(self.live)] = np.arange(len(self.live))
        if strangers := messages.ranks_without(place_of):
            raise ValueError(
                f"exchange with ranks {strangers}, which are not live; live are {self.live}"
            )
        me = self.live.index(self.rank)
        others = [rank for rank in self.live if rank != self.rank]
        of_others = place_of - (place_of > me)
        of_others[self.rank] = -1
        lists = [messages.single.get(rank, ()) for rank in others]
        shared = [self._places_shared(rank, tensors) for rank, tensors in zip(others, lists)]
        places = [
            [place for place in wire.places_of(tensors, wire.APART_BYTES) if place not in there][
                :MOST_APART
            ]
            for tensors, there in zip(lists, shared)
        ]
        spreads = [self._addressed(spread, of_others) for spread in messages.spreads]
        packed = wire.pack_all(lists, places, shared, self._scratch_of, spreads)
        shared_bytes = sum(
            wire.spared(parts[place]) for parts, there in zip(lists, shared) for place in there
        ) + sum(int(addressed.spared[addressed.shared].sum()) for addressed in spreads)
        self.sent_bytes += shared_bytes
        self._shared_memory.shared_bytes += shared_bytes
        apart = [
            [wire.bytes_of(parts[place]) for place in chosen]
            for parts, chosen in zip(lists, places)
        ]
        mine = messages.single.get(self.rank, ())
        of_me = np.where(place_of == me, 0, -1)
        to_me = [self._addressed(spread, of_me) for spread in messages.spreads]
        packed[me:me] = wire.pack_all(
            [mine], [()], [self._places_shared(self.rank, mine)], spreads=to_me
        )
        apart.insert(me, [])
        return self._collect(EXCHANGE, packed, apart)

    def share(self, tensors: Sequence[Part]) -> Mapping[int, list[Received]]:
        """As in `Transport`."""
        return self._collect(SHARE, [wire.pack(tensors)] * len(self.live), [[]] * len(self.live))

    def _collect(
        self, kind: int, packed: list[np.ndarray], apart: list[list[np.ndarray]]
    ) -> Mapping[int, list[Received]]:
        """Deliver the messages, and unpack the messages that came.

        The caller of the transport gets views of the message to itself, so `packed` for this rank
        must be the caller's own memory.
        """
        self.sent_bytes += sum(len(message) for message in packed) - len(
            packed[self.live.index(self.rank)]
        )
        self.sent_bytes += sum(wire.padded(len(memory)) for some in apart for memory in some)
        came = self._deliver(kind, packed, apart)
        self._shared_memory.completed()
        if len(came) < outbox.MANY:
            return {
                rank: wire.unpack(words, memory, self._memory_of(rank))
                for rank, (words, memory) in came.items()
                if words.size
            }
        words, memory = zip(*came.values())
        return Inbox(Packed(list(came), list(words), list(memory), self._memory_of))

    def _places_shared(self, rank: int, tensors: Sequence[Part]) -> dict[int, int]:
        """{place: the tensor's offset in this rank's memory}, if `rank` can read the memory."""
        if rank != self.rank and rank not in self._shared_memory.readers:
            return {}
        found = (
            (place, self._shared_memory.offset(memory))
            for place, memory in wire.worth_sharing(tensors)
        )
        return {place: offset for place, offset in found if offset is not None}

    def _memory_of(self, rank: int) -> np.ndarray | None:
        return (
            self._shared_memory.memory if rank == self.rank else self._shared_memory.memory_of(rank)
        )

    def _addressed(self, spread: Spread, place_of: np.ndarray) -> wire.Addressed:
        """A spread for a call with messages to the ranks with a place in `place_of`."""
        offset, reads = None, np.zeros(self._ranks, np.bool_)
        if isinstance(spread.payload, Picked):
            offset = self._shared_memory.offset(spread.payload.source)
            reads[[self.rank, *self._shared_memory.readers]] = True
        return wire.Addressed(spread, place_of[spread.ranks], offset, reads[spread.ranks])

    def _scratch_of(self, size: int) -> np.ndarray:
        """Memory for packed messages; the next call overwrites the memory.

        New memory in every call costs more than the copy: 1.8 ms against 0.08 ms for 4 MB, because
        glibc gives freed blocks of this size back to the kernel. Overwriting is safe after an
        interrupted call too: the carrier only reads the memory, and the next call comes after a
        `shrink`, which no live rank passes while another rank still receives.
        """
        if size > self._scratch.size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch[:size]

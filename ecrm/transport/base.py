"""The one interface between the engine and whatever carries bytes between ranks.

Three implementations run the same engine: `ecrm.transport.mpi` (MPI with ULFM),
`ecrm.transport.simulated` (many ranks in one process, faults drawn from a seed) and
`ecrm.transport.alone` (a rank without others).

A rank keeps its number for life: `rank` and `live` are numbers in the world the run was started
with, never renumbered when others die.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecrm.base.allocate import lazy_zeros
from ecrm.transport.message import Part, Received, tensors
from ecrm.transport.pulse import Pulse
from ecrm.transport.shared_memory import SharedMemory

WORD_BITS = 13
"""Bits of a word that ranks compare in an agreement: two words and four flags fit in a C int."""
ReceiveMemory = Callable[[int], np.ndarray]


def new_memory(size: int) -> np.ndarray:
    """So many bytes, uint8, holding anything."""
    return np.empty(size, np.uint8)


class PeerFailure(Exception):
    """A peer died, or another rank has begun to recover from a death.

    Call `shrink` and go back to the commit.
    """


class Revoked(PeerFailure):
    """Another rank has begun to recover: that one knows what failed."""


class Transport(ABC):
    """Collective communication of tensors and heads among the live ranks.

    Every method but `close` is collective: all live ranks call the same methods in the same order.
    Every method but `shrink` and `close` raises `PeerFailure` when a live rank has died or another
    rank has called `shrink`; the call may then have completed on some ranks and not on others.
    """

    rank: int
    live: tuple[int, ...]
    sent_bytes: int = 0
    """Bytes of messages given to other ranks so far, as `wire` packs them.

    Tensors in shared memory count; agreements and shrinks do not.
    """
    sleeps: bool = False
    """Whether this rank sleeps while it waits for messages, instead of polling, from its next call
    on.

    To be set where ranks outnumber the cores. A transport whose ranks wait in another way ignores
    it.
    """
    shared_memory: SharedMemory | None = None
    """Memory that ranks of a host share, for those who introduce them at the start, or None."""
    pulse: Pulse | None = None
    """The pulse of this rank's GPU, where a guard looks at it."""
    receive_memory: ReceiveMemory = staticmethod(new_memory)
    """Gives memory for what comes, so many bytes, uint8, where the transport copies it at all."""

    def allocate_shared(self, *shape: int, dtype: type = np.float32) -> Tensor:
        """Zeros of that shape in memory that other ranks of the host can read.

        The system hands it out as it is used.

        What `exchange` sends of such memory may come out as a view of it, for reading, and of rows
        picked from it as a `Picked`. Its sender may change it only after an exchange or shrink that
        every live rank enters when it has no more use for what it got (docs/internals/transport.md,
        "Shared memory").
        """
        return lazy_zeros(*shape, dtype=dtype)

    @abstractmethod
    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> dict[int, list[Received]]:
        """Send a list of tensors and heads to each of some ranks; return those sent to this one.

        `outgoing` maps live ranks, this one allowed, to parts: contiguous CPU tensors of any dtype
        and shape, rows to be picked of such, and heads, which are tuples of 64-bit integers.
        Returns, by sender in ascending order, the parts that each rank has sent here, in order.
        Tensors come flattened to one dimension, dtypes kept; `Picked` parts as `Picked` says.

        What was given must not be changed before this returns, nor, after `PeerFailure`, before
        `shrink` does: another rank may still be about to get it. The result is the caller's own
        memory, but for views of memory from `allocate_shared`: it stays valid and is never a view
        of what a rank passed in. Raises ValueError for a rank that is not live.
        """

    @abstractmethod
    def share(self, tensors: Sequence[Part]) -> dict[int, list[Received]]:
        """Give every live rank this rank's tensors and heads.

        Returns all ranks' lists as `exchange` does, this rank's included.
        """

    def gather(self, value: Any, doing: str = "") -> dict[int, Any]:
        """Give every live rank this rank's `value`, of a kind that JSON has.

        Returns all ranks' values by rank, in ascending order. With `doing`, words for the error,
        all ranks agree behind it: a rank that returns knows that every other rank has sent its
        value, and PeerFailure says that a rank died while `doing`.
        """
        text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        shared = self.share([text])
        if doing and not self.agree(True):
            raise PeerFailure(f"a rank died while {doing}")
        return {
            rank: json.loads(bytes(tensors(parts)[0].tolist()))
            for rank, parts in sorted(shared.items())
        }

    def agree(self, flag: bool) -> bool:
        """Return on every rank whether all live ranks called with True.

        Uniform: if it returns True on one rank, every other live rank had already called `agree`
        with True. A rank may still see `PeerFailure` where another saw True; never True where
        another saw False.
        """
        return self.agree_alike(flag, None)[0]

    @abstractmethod
    def agree_alike(self, flag: bool, word: int | None) -> tuple[bool, bool]:
        """`agree`, and whether all live ranks that gave a word gave the same.

        A word has WORD_BITS bits. A rank without a word gives None. Uniform as `agree` is.
        """

    @abstractmethod
    def shrink(self) -> None:
        """Interrupt every pending call on all ranks and drop the dead from `live`.

        The survivors' next call is possible then.

        On return `live` is the same on all survivors that return from this shrink. Does not raise
        `PeerFailure`: ranks that die meanwhile are dropped too, or are found by the next call.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the cluster; no method may be called afterwards.

        Not collective, and never blocks without bound.
        """


class WrappedTransport(Transport):
    """Another transport, `inner`, for a subclass that adds something to some of its calls."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.inner.rank

    @property
    def live(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.inner.live

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        return self.inner.sent_bytes

    @property
    def sleeps(self) -> bool:
        return self.inner.sleeps

    @sleeps.setter
    def sleeps(self, sleeps: bool) -> None:
        self.inner.sleeps = sleeps

    @property
    def shared_memory(self) -> SharedMemory | None:  # type: ignore[override]
        return self.inner.shared_memory

    @property
    def pulse(self) -> Pulse | None:  # type: ignore[override]
        return self.inner.pulse

    @property
    def receive_memory(self) -> ReceiveMemory:
        return self.inner.receive_memory

    @receive_memory.setter
    def receive_memory(self, receive_memory: ReceiveMemory) -> None:
        self.inner.receive_memory = receive_memory

    def allocate_shared(self, *shape: int, dtype: type = np.float32) -> Tensor:
        return self.inner.allocate_shared(*shape, dtype=dtype)

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> dict[int, list[Received]]:
        return self.inner.exchange(outgoing)

    def share(self, tensors: Sequence[Part]) -> dict[int, list[Received]]:
        return self.inner.share(tensors)

    def agree_alike(self, flag: bool, word: int | None) -> tuple[bool, bool]:
        return self.inner.agree_alike(flag, word)

    def shrink(self) -> None:
        self.inner.shrink()

    def close(self) -> None:
        self.inner.close()

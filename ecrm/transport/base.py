"""The interface between the engine and the carriers of bytes between ranks.

Four implementations run the same engine: `ecrm.transport.mpi` (MPI with ULFM),
`ecrm.transport.links` (links that may break, between hosts), `ecrm.testing.simulated_transport`
(many ranks in one process, faults drawn from a seed) and `ecrm.transport.alone` (a single rank).

A rank keeps its number for life: `rank` and `live` are numbers in the world at the start of the
run, never renumbered after a death.

# Duties of the caller

- One thread per rank makes all calls.
- All live ranks make the same calls in the same order, from one shrink to the next. If the calls of
  two ranks differ, a transport may wait for ever.
- Memory given to `exchange` or `share` stays unchanged until the call returns. After `PeerFailure`
  the memory stays unchanged until `shrink` returns. Memory from `allocate_shared` stays unchanged
  for longer: see there.
- After `PeerFailure` the rank calls `shrink`, or leaves by `close`, or dies. Until then other ranks
  may wait for the rank: only a shrink or the end of the rank interrupts their calls.
- A failed rank must really die: `shrink` waits without a bound for a rank that hangs.

# Order of calls

- Before the first message: set `pulse` and `receive_memory`, if wanted. `sleeps` may change between
  any two calls.
- Once, if ranks of a host share memory under MPI: `share` the results of `SharedMemory.offer`, then
  of `SharedMemory.accept`, then call `SharedMemory.share_with`. Until then all tensors are copied.
- Per step: any number of `exchange` and `share`, then `agree` before the effects become final. An
  exchange or share may complete on some ranks only.
- After each `PeerFailure`: `shrink`, then undo the step, then `share` the commit of every rank,
  then `agree`. A `PeerFailure` in this recovery begins the recovery anew.
- After a commit, if ranks wait to join: `shrink(Admit.ASKS)` on all ranks, then as after a failure.
  A rank that joins calls `enter`, then makes the calls after this shrink.
- Last: `close`. Under MPI the process then ends by `os._exit`.

In code, for a rank with a state to commit:

    while True:
        try:
            received = transport.exchange(outgoing)
            if transport.agree(True):
                commit(received)
        except PeerFailure:
            transport.shrink()
            recover()  # begins anew after a PeerFailure

`agree` may raise on one rank and return True on another. Survivors of a shrink may therefore be a
single commit apart, and `recover` must bring the rank that is behind to the newest commit.

# Errors

- `PeerFailure`: the call has no result here, and may have completed on other ranks. `live` still
  names the dead. Requests of the call may be pending, and may still read the memory given.
- `Revoked`: a `PeerFailure` that tells of no death. Another rank has called `shrink`, or, in an
  agreement, has left.
- `ValueError` for a receiver that is not live, or for a tensor that cannot travel; `OverflowError`
  for a head with a number of more than 64 bits: nothing was sent, and the call does not count. The
  other ranks wait: the rank repeats the call correctly, or dies.
- `RuntimeError` from MPI: ranks made different calls, as far as the stamps of messages show. The
  program is wrong and the rank must die. In simulation the whole run ends with
  `SimulationMismatch`.
- Any other error in a call: the rank must die, and the others recover as from any death.
- `shrink` and `close` raise no `PeerFailure`. After `shrink` no call is pending and `live` is the
  same on all survivors of the shrink. A death during `shrink` may show only as a `PeerFailure` of
  the next call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ecrm.base.allocate import lazy_zeros
from ecrm.device.pulse import Pulse
from ecrm.transport.membership import Admit
from ecrm.transport.message import Part, Received, json_part, of_json_part
from ecrm.transport.shared_memory import SharedMemory

WORD_BITS = 13
"""Bits of a word compared in an agreement: two words and four flags fit in a C int."""
ReceiveMemory = Callable[[int], np.ndarray]


def new_memory(size: int) -> np.ndarray:
    """Return `size` bytes of any content, uint8."""
    return np.empty(size, np.uint8)


class PeerFailure(Exception):
    """A peer died, or another rank has begun to recover from a death.

    Call `shrink` and go back to the commit.
    """


class Revoked(PeerFailure):
    """Another rank has begun to recover, and knows the failure; this rank does not."""


class Transport(ABC):
    """Collective communication of tensors and heads among the live ranks.

    Every method but `allocate_shared` and `close` is collective: all live ranks call the same
    methods in the same order. Every collective method but `shrink` raises `PeerFailure` after the
    death of a live rank, or after another rank has called `shrink`; the call may then have
    completed on some ranks and not on others.
    """

    rank: int
    live: tuple[int, ...]
    sent_bytes: int = 0
    """Bytes of messages given to other ranks until now, as `wire` packs messages.

    Tensors in shared memory count; agreements and shrinks do not.
    """
    sleeps: bool = False
    """Whether this rank sleeps, not polls, in waits for messages, from the next call on.

    To be set if ranks outnumber the cores. A transport with another way of waiting ignores
    `sleeps`.
    """
    shared_memory: SharedMemory | None = None
    """Memory shared by ranks of a host, for the introduction at the start, or `None`."""
    rounds_at_start: int = 0
    """Number of finished calls of `share_at_start`."""
    said_at_start: tuple[Any, ...] = ()
    """Results of the calls of the start; on a rank that joins, those still to be made."""
    joined: bool = False
    """Whether this rank has joined a session under way, and makes the calls of the start alone."""
    pulse: Pulse | None = None
    """The pulse of this rank's GPU, if a guard watches the GPU."""
    receive_memory: ReceiveMemory = staticmethod(new_memory)
    """Returns memory for received bytes, uint8, given a size, if the transport copies them."""

    @property
    def newcomers_wait(self) -> bool:
        """Whether ranks wait to join, as far as known on this rank. Not collective."""
        return False

    def allocate_shared(self, *shape: int, dtype: type = np.float32) -> Tensor:
        """Return zeros of a shape in memory readable by other ranks of the host.

        The system hands out pages at first use. Not collective.

        A receiver may get tensors of such memory from `exchange` as views, for reading, and picked
        rows as `Picked`. The sender may change the memory only after an exchange or shrink that
        every live rank enters when done with the received views (docs/internals/transport.md,
        "Shared memory").
        """
        return lazy_zeros(*shape, dtype=dtype)

    @abstractmethod
    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> Mapping[int, list[Received]]:
        """Send a list of tensors and heads to some ranks; return the lists sent to this rank.

        `outgoing` maps live ranks, this rank allowed, to parts: contiguous CPU tensors of any dtype
        and shape, `Picked` rows of such tensors, and heads, tuples of 64-bit integers. Returns, by
        sender in ascending order, the parts sent here by a rank, in order. Tensors come flattened
        to one dimension, dtypes kept; `Picked` parts as `Picked` says.

        Memory given must not be changed before the call returns, nor, after `PeerFailure`, before
        `shrink` returns: another rank may still be about to receive from the memory. The result is
        the caller's own memory, except views of memory from `allocate_shared`: the result stays
        valid and is never a view of memory passed in by a rank. Raises ValueError for a rank that
        is not live.
        """

    @abstractmethod
    def share(self, tensors: Sequence[Part]) -> Mapping[int, list[Received]]:
        """Give every live rank this rank's tensors and heads.

        Returns all ranks' lists as `exchange` does, this rank's included.
        """

    def gather(self, value: Any, doing: str = "") -> dict[int, Any]:
        """Give every live rank this rank's `value`, of a kind that JSON has.

        Returns all ranks' values by rank, in ascending order. With `doing`, words for the error,
        all ranks agree behind it: a rank that returns knows that every other rank has sent its
        value, and PeerFailure says that a rank died while `doing`.
        """
        shared = self.share([json_part(value)])
        if doing:
            self.barrier(doing)
        return {rank: of_json_part(part) for rank, (part,) in sorted(shared.items())}

    def agree(self, flag: bool) -> bool:
        """Return on every rank whether all live ranks called with True.

        Uniform: if `agree` returns True on a rank, every other live rank had already called `agree`
        with True. A rank may still see `PeerFailure` beside a True on another rank; never True
        beside False.
        """
        return self.agree_alike(flag, None)[0]

    def barrier(self, doing: str) -> None:
        """Return once all live ranks have called `barrier`: an agreement in which all say True.

        Raises PeerFailure after a death, with `doing`, words for the work before the call.
        """
        if not self.agree(True):
            raise PeerFailure(f"a rank died while {doing}")

    @abstractmethod
    def agree_alike(self, flag: bool, word: int | None) -> tuple[bool, bool]:
        """`agree`, and whether all live ranks with a word gave the same word.

        A word has WORD_BITS bits. A rank without a word gives `None`. Uniform like `agree`.
        """

    @abstractmethod
    def shrink(self, admit: Admit = Admit.NO) -> None:
        """Interrupt every pending call on all ranks and drop the dead from `live`.

        The survivors can then make the next call. If a survivor asks for ranks that wait to join,
        and all other survivors admit such ranks, the ranks are in `live` too. A rank that died in
        this epoch cannot join by the same shrink. A rank with an unfinished recovery may not admit.

        On return `live` is the same on all survivors returning from this shrink. Does not raise
        `PeerFailure`: ranks dying meanwhile are dropped too, or are found by the next call.
        """

    def enter(self) -> None:
        """On a rank that has `joined`, before any other call: wait until a shrink admits this rank.

        Afterwards the rank is in the epoch of the shrink, as its other ranks are. A transport may
        have admitted the rank before.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Leave the cluster; no method may be called afterwards.

        Not collective, and never blocks without bound.
        """


class WrappedTransport(Transport):
    """A transport around `inner`; subclasses extend some of the calls."""

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
    def rounds_at_start(self) -> int:
        return self.inner.rounds_at_start

    @rounds_at_start.setter
    def rounds_at_start(self, rounds: int) -> None:
        self.inner.rounds_at_start = rounds

    @property
    def said_at_start(self) -> tuple[Any, ...]:
        return self.inner.said_at_start

    @said_at_start.setter
    def said_at_start(self, said: tuple[Any, ...]) -> None:
        self.inner.said_at_start = said

    @property
    def joined(self) -> bool:
        return self.inner.joined

    @joined.setter
    def joined(self, joined: bool) -> None:
        self.inner.joined = joined

    @property
    def newcomers_wait(self) -> bool:
        return self.inner.newcomers_wait

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

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> Mapping[int, list[Received]]:
        return self.inner.exchange(outgoing)

    def share(self, tensors: Sequence[Part]) -> Mapping[int, list[Received]]:
        return self.inner.share(tensors)

    def agree_alike(self, flag: bool, word: int | None) -> tuple[bool, bool]:
        return self.inner.agree_alike(flag, word)

    def shrink(self, admit: Admit = Admit.NO) -> None:
        self.inner.shrink(admit)

    def enter(self) -> None:
        self.inner.enter()

    def close(self) -> None:
        self.inner.close()

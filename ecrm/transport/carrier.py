"""The links of one rank over sockets: `kernels/links/carrier.h` from Python."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import weakref
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from ecrm.base.errors import EcrmError
from ecrm.kernels import native
from ecrm.kernels.links import Identity, Settings

NOTHING = np.empty(0, np.uint8)


class Figures(NamedTuple):
    """Counts of a carrier: connections broken, messages sent again, connections refused,
    connections that said nothing, bytes of messages without acknowledgement, the address
    refused last, and the address that said nothing last.
    """

    losses: int
    resent: int
    refused: int
    silent: int
    kept_bytes: int
    refused_address: str
    silent_address: str


class Carrier:
    """Links to all other ranks, and a thread that serves the links while the rank computes.

    Calls wait without Python's lock. No peer is live before `begin_epoch`.

    Raises EcrmError if the carrier cannot listen on `address`.
    """

    def __init__(self, me: Identity, world: int, settings: Settings, address: str) -> None:
        self._library = native.library()
        self._size, port = ctypes.c_uint64(), ctypes.c_int()
        self._at = self._library.ecrm_carrier_new(
            me.run,
            me.secret,
            len(me.secret),
            me.rank,
            world,
            ctypes.addressof(settings),
            address.encode(),
            ctypes.addressof(port),
        )
        if not self._at:
            raise EcrmError(f"cannot listen on {address}: {os.strerror(port.value)}")
        self.address, self.port, self._world, self._rank = address, port.value, world, me.rank
        self._end = weakref.finalize(self, _free, self._at, os.getpid())
        self._end.atexit = False

    def peer(self, rank: int, address: str, port: int) -> None:
        """Set the place where a peer listens. Raises ValueError for a wrong address."""
        if not self._library.ecrm_carrier_peer(self._at, rank, address.encode(), port):
            raise ValueError(f"rank {rank}: {address!r} is no IPv4 address")

    def begin_epoch(self, epoch: int, live: Collection[int]) -> None:
        """Drop all messages, and begin anew with the ranks of `live`.

        A connection to a rank of the epoch before stays, unless a message is half written.
        """
        self._library.ecrm_carrier_begin_epoch(self._at, epoch, self._marks(live))

    def lease(self, address: str, port: int, keep_alive: float, last: int = 0) -> None:
        """Beat to the head from now on. Without answers, the process kills itself.

        The place may also be the place of the agent that carries the beats. The numbers of beats
        are above `last`. `keep_alive` holds until `begin_lease`.

        Raises EcrmError if there is no way to the head.
        """
        if not self._library.ecrm_carrier_lease(self._at, address.encode(), port, keep_alive, last):
            raise EcrmError(f"cannot reach the head machine at {address} from {self.address}")

    def begin_lease(self, keep_alive: float) -> None:
        """Be a member from now on: without answers in this time the process kills itself."""
        self._library.ecrm_carrier_begin_lease(self._at, keep_alive)

    def leased(self) -> bool:
        """Whether the head has answered a beat since `begin_lease`, and counts on the lease."""
        return bool(self._library.ecrm_carrier_leased(self._at))

    def news(self) -> int:
        """The number of the head's state, as in the last answer to a beat; 0 without an answer."""
        return int(self._library.ecrm_carrier_news(self._at))

    def end_lease(self) -> None:
        """Beat no more; this process may go on without answers."""
        self._library.ecrm_carrier_end_lease(self._at)

    def watch(self, connection: socket.socket) -> None:
        """Return early from waits while the connection has something to read."""
        self._library.ecrm_carrier_watch(self._at, connection.fileno())

    def send(self, rank: int, memory: np.ndarray, lend: bool) -> bool:
        """Send a message of uint8; return False for a full window: try again later.

        `lend`: the memory is not copied, and stays unchanged until `flush` returns True, or a new
        epoch begins.
        """
        return bool(
            self._library.ecrm_carrier_send(self._at, rank, memory.ctypes.data, memory.nbytes, lend)
        )

    def receive(self, rank: int, seconds: float) -> np.ndarray | None:
        """Return the next message of a rank, uint8; `None` if no message came in time."""
        at = self._library.ecrm_carrier_receive(
            self._at, rank, ctypes.addressof(self._size), seconds
        )
        if not at:
            return None
        if not self._size.value:
            self._library.ecrm_link_free_message(at)
            return NOTHING
        memory = (ctypes.c_uint8 * self._size.value).from_address(at)
        weakref.finalize(memory, self._library.ecrm_link_free_message, at).atexit = False
        return np.frombuffer(memoryview(memory), np.uint8)

    def flush(self, seconds: float, away: Collection[int] = ()) -> bool:
        """Wait until no memory is lent to ranks outside `away`; return whether this came true."""
        return bool(self._library.ecrm_carrier_flush(self._at, seconds, self._marks(away)))

    def all_acked(self, seconds: float, away: Collection[int] = ()) -> bool:
        """Wait until all live peers outside `away` have all messages.

        Returns whether this came true in time.
        """
        return bool(self._library.ecrm_carrier_all_acked(self._at, seconds, self._marks(away)))

    def acknowledge_all(self) -> None:
        """Acknowledge at once all that has come."""
        self._library.ecrm_carrier_acknowledge_all(self._at)

    def down(self, rank: int) -> float:
        """Seconds without a byte to a rank, in this epoch."""
        return float(self._library.ecrm_carrier_down(self._at, rank))

    def cut(self, rank: int) -> bool:
        """Shut down the connection to a rank, as a reset does; False without a connection."""
        return bool(self._library.ecrm_carrier_cut(self._at, rank))

    def figures(self) -> Figures:
        """The counts until now."""
        counts = (ctypes.c_uint64 * 7)()
        self._library.ecrm_carrier_figures(self._at, counts)
        losses, resent, refused, silent, kept, *places = counts
        addresses = (socket.inet_ntoa(struct.pack("=I", place)) for place in places)
        return Figures(losses, resent, refused, silent, kept, *addresses)

    def _marks(self, ranks: Collection[int]) -> bytes:
        return bytes(rank in ranks for rank in range(self._world)) if ranks else bytes(self._world)

    def close(self) -> None:
        """Close all connections and end the thread; no method may be called afterwards."""
        with contextlib.suppress(KeyError):
            self._end()


def _free(at: int, pid: int) -> None:
    """End a carrier, in its own process: a forked process has no thread to wait for."""
    if os.getpid() == pid:
        native.library().ecrm_carrier_free(at)

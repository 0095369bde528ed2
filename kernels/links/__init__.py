"""The link of two ranks: numbered messages that outlive the connections carrying the messages."""

from __future__ import annotations

import ctypes
import weakref

from ecrm.kernels import native
from ecrm.kernels.links.settings import DOWN, GREETING, UP, Identity, Settings, Step

__all__ = ["DOWN", "GREETING", "UP", "Identity", "Link", "Reception", "Settings", "Step"]

_FIGURES = 10


class Link:
    """One end of a link, in C++: events in, actions out, no I/O.

    Times are seconds of any clock without steps back. The caller moves the bytes: `gather` gives
    bytes to write, `wrote` confirms written bytes, `came` takes received bytes. False from `came`,
    `tick` or `adopt` asks the caller to close the connection and to call `broke`. The rank with the
    lower number dials.

    Args:
        me: This rank.
        peer: The rank of the other end.
        settings: Times and limits.
    """

    def __init__(self, me: Identity, peer: int, settings: Settings) -> None:
        self._library = native.library()
        self._at = self._library.ecrm_link_new(
            me.run, me.secret, len(me.secret), me.rank, peer, ctypes.addressof(settings)
        )
        self.dials = me.rank < peer
        weakref.finalize(self, self._library.ecrm_link_free, self._at)

    @property
    def state(self) -> int:
        """DOWN, dialling (1), GREETING or UP."""
        return self._figure(0)

    @property
    def epoch(self) -> int:
        """The epoch of the link, 1 at first."""
        return self._figure(1)

    @property
    def expected(self) -> int:
        """The number of the next message to come; messages are numbered from 1."""
        return self._figure(2)

    @property
    def partial(self) -> int:
        """The bytes that have come of this message."""
        return self._figure(3)

    @property
    def sent(self) -> int:
        """The number of the last message given to `send`."""
        return self._figure(4)

    @property
    def acked(self) -> int:
        """The number of the last message that has arrived for certain."""
        return self._figure(5)

    @property
    def kept_bytes(self) -> int:
        """Bytes of messages without acknowledgement, OVERHEAD for each message included."""
        return self._figure(6)

    @property
    def losses(self) -> int:
        """The number of broken connections."""
        return self._figure(7)

    @property
    def resent(self) -> int:
        """The number of messages to be written again, at most, over later connections."""
        return self._figure(8)

    @property
    def lent(self) -> bool:
        """Whether a lent message has no acknowledgement yet."""
        return bool(self._figure(9))

    def wants_dial(self, now: float) -> bool:
        """Whether this end is to dial now."""
        return bool(self._library.ecrm_link_wants_dial(self._at, now))

    def next(self) -> float:
        """The time of the next `tick` with an effect; infinite if bytes alone matter."""
        return float(self._library.ecrm_link_next(self._at))

    def down(self, now: float) -> float:
        """Seconds without a byte of the other rank, in this epoch."""
        return float(self._library.ecrm_link_down(self._at, now))

    def dialling(self, now: float) -> None:
        """This end begins to make a connection."""
        self._library.ecrm_link_dialling(self._at, now)

    def dialled(self, now: float, nonce: bytes) -> None:
        """The connection is made; `nonce` has 16 random bytes."""
        self._library.ecrm_link_dialled(self._at, now, nonce)

    def adopt(self, now: float, expected: int, partial: int) -> bool:
        """Take over a connection of a `Reception` that is PROVED, with the numbers of it."""
        return bool(self._library.ecrm_link_adopt(self._at, now, expected, partial))

    def broke(self, now: float) -> None:
        """The connection is closed, or could not be made."""
        self._library.ecrm_link_broke(self._at, now)

    def tick(self, now: float) -> bool:
        """Time has passed. False: close the connection."""
        return bool(self._library.ecrm_link_tick(self._at, now))

    def acknowledge_all(self) -> None:
        """Acknowledge received messages now, not with the next message or beat."""
        self._library.ecrm_link_acknowledge_all(self._at)

    def send(self, data: bytes) -> int:
        """Return the number of the message; 0 for a full window: try again later."""
        return int(self._library.ecrm_link_send(self._at, data, len(data), 0))

    def lend(self, memory: ctypes.Array[ctypes.c_char]) -> int:
        """`send` without a copy: the memory stays unchanged until `lent` is false."""
        return int(self._library.ecrm_link_send(self._at, memory, len(memory), 1))

    def take(self) -> bytes | None:
        """Return the oldest received message, `None` if there is none."""
        size = ctypes.c_uint64()
        at = self._library.ecrm_link_take(self._at, ctypes.addressof(size))
        if not at:
            return None
        data = ctypes.string_at(at, size.value)
        self._library.ecrm_link_free_message(at)
        return data

    def begin_epoch(self, now: float, epoch: int, keeps: bool = False) -> bool:
        """Drop all messages; numbers begin at 1 again.

        The connection stays if `keeps` asks so, unless a message is half written. Returns whether
        the connection stays; else the caller closes the connection.
        """
        return bool(self._library.ecrm_link_begin_epoch(self._at, now, epoch, keeps))

    def came(self, now: float, data: bytes) -> bool:
        """Bytes have come. False: close the connection."""
        return bool(self._library.ecrm_link_came(self._at, now, data, len(data)))

    def gather(self, most: int) -> bytes:
        """Return the next bytes to write, up to `most`; the same bytes until `wrote`."""
        room = ctypes.create_string_buffer(most)
        size = self._library.ecrm_link_gather(self._at, room, most)
        return room.raw[:size]

    def wrote(self, now: float, n: int) -> None:
        """The first `n` bytes of the last `gather` are written."""
        self._library.ecrm_link_wrote(self._at, now, n)

    def _figure(self, place: int) -> int:
        figures = (ctypes.c_uint64 * _FIGURES)()
        self._library.ecrm_link_figures(self._at, figures)
        return figures[place]


class Reception:
    """An accepted connection before its proof, in C++: bytes in, steps out.

    After ASKS the caller sends the bytes of `answer`, or closes the connection. After PROVED the
    connection goes to the link with `sender`. After REFUSED the connection is closed.
    """

    def __init__(self, me: Identity) -> None:
        self._library = native.library()
        self._at = self._library.ecrm_reception_new(me.run, me.secret, len(me.secret), me.rank)
        weakref.finalize(self, self._library.ecrm_reception_free, self._at)

    @property
    def wanted(self) -> int:
        """The most bytes to be given to `came` next."""
        return int(self._library.ecrm_reception_wanted(self._at))

    @property
    def sender(self) -> int:
        """The rank that has dialled; known from ASKS on, and proved by PROVED."""
        return self._figure(0)

    @property
    def epoch(self) -> int:
        """The epoch of the dialling rank."""
        return self._figure(1)

    @property
    def expected(self) -> int:
        """The number of the next message expected by the dialling rank."""
        return self._figure(2)

    @property
    def partial(self) -> int:
        """The bytes of this message at the dialling rank."""
        return self._figure(3)

    def came(self, data: bytes) -> Step:
        """Up to `wanted` bytes have come."""
        return Step(self._library.ecrm_reception_came(self._at, data, len(data)))

    def answer(self, epoch: int, expected: int, partial: int, nonce: bytes) -> bytes:
        """Return the answer of a link with these numbers; `nonce` has 16 random bytes."""
        room = ctypes.create_string_buffer(256)
        size = self._library.ecrm_reception_answer(self._at, epoch, expected, partial, nonce, room)
        return room.raw[:size]

    def _figure(self, place: int) -> int:
        figures = (ctypes.c_uint64 * 4)()
        self._library.ecrm_reception_figures(self._at, figures)
        return figures[place]

"""The link in plain Python: the same bytes, states and times as `link.h`, for the same events."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import math
import struct
from collections import deque

from ecrm.kernels.links.settings import (
    DOWN,
    GREETING,
    MOST_BYTES,
    OVERHEAD,
    UP,
    Identity,
    Settings,
    Step,
)

DIALLING = 1
MAGIC = 0x316B6E696C6D7263
GREETING_FORMAT = struct.Struct("<Q16sIIQQQ16s")  # magic, run, from, to, epoch, expected, ...
FRAME = struct.Struct("<QQQQQ")  # kind, number, size, offset, acknowledged
DATA, ACK, EPOCH = 1, 2, 3
DIGEST_BYTES = 32
FIRST_PATIENCE = 4


def proof(secret: bytes, side: bytes, dialler: bytes, answerer: bytes) -> bytes:
    """The proof of the dialled rank (`side` b"a") or of the dialling rank (b"d")."""
    return hmac.new(secret, side + dialler + answerer, hashlib.sha256).digest()


class Link:
    """As `ecrm.kernels.links.Link`."""

    def __init__(self, me: Identity, peer: int, settings: Settings) -> None:
        self._me, self._peer, self._settings = me, peer, settings
        self.epoch, self.losses, self.resent = 1, 0, 0
        self._began = self._heard = self._said = 0.0
        self._their_epoch, self._written = 1, 0
        self._writing, self._writing_number = b"", 0
        self._carries = False
        self._patience = settings.greet / FIRST_PATIENCE
        self._forget(0.0)
        self._forget_incoming()
        self._drop()

    def _forget(self, now: float) -> None:
        self._kept: deque[tuple[int, bytes | memoryview]] = deque()
        self.sent = self._acked = self._told = self.kept_bytes = self._resume = 0
        self._lent = 0
        self._next, self._pause = 0, self._settings.first_pause
        self._again = self._since = now

    def _forget_incoming(self) -> None:
        self._ready: deque[bytes] = deque()
        self._body: bytearray | None = None
        self._body_size, self.expected, self._told, self._unsaid = 0, 1, 0, 0

    def _drop(self) -> None:
        self.state = DOWN
        self._control = self._answer = self._writing = self._head = b""
        self._writing_number = self._skip = 0
        self._due = self._announces = self._in_body = False
        self._release()
        self._next = 0

    @property
    def dials(self) -> bool:
        return self._me.rank < self._peer

    @property
    def partial(self) -> int:
        return len(self._body or b"")

    @property
    def acked(self) -> int:
        number = self._writing_number
        return min(self._acked, number - 1) if self._writing and number else self._acked

    @property
    def lent(self) -> bool:
        return self._lent > self.acked

    def wants_dial(self, now: float) -> bool:
        return self.dials and self.state == DOWN and now >= self._again

    def next(self) -> float:
        if self.state == DOWN:
            return self._again if self.dials else math.inf
        if self.state != UP:
            return self._began + self._patience
        silent = self._heard + self._settings.silence
        busy = self._writing or self._due
        return silent if busy else min(silent, self._said + self._settings.beat)

    def down(self, now: float) -> float:
        return 0.0 if self.state == UP and self._carries else now - self._since

    def dialling(self, now: float) -> None:
        self.state, self._began = DIALLING, now

    def dialled(self, now: float, nonce: bytes) -> None:
        self.state, self._answer = GREETING, b""
        self._mine = self._control = GREETING_FORMAT.pack(
            MAGIC,
            self._me.run,
            self._me.rank,
            self._peer,
            self.epoch,
            self.expected,
            self.partial,
            nonce,
        )

    def adopt(self, now: float, expected: int, partial: int) -> bool:
        self.broke(now)
        return self._up(now, expected, partial)

    def broke(self, now: float) -> None:
        if self.state == DOWN:
            return
        if self.state == UP:
            self.losses += 1
            self.resent += self._next
            if self._carries:
                self._since = max(self._since, self._heard)
        elif now >= self._began + self._patience:
            self._patience = min(2 * self._patience, self._settings.greet)
        self._drop()
        self._again = now + self._pause
        self._pause = min(2 * self._pause, self._settings.longest_pause)

    def tick(self, now: float) -> bool:
        if self.state not in (DOWN, UP):
            return now < self._began + self._patience
        if self.state != UP:
            return True
        if now >= self._heard + self._settings.silence:
            return False
        if now >= self._said + self._settings.beat and not self._writing:
            self._due = True
        return True

    def acknowledge_all(self) -> None:
        if self.state == UP and self.expected - 1 > self._told:
            self._due = True

    def send(self, data: bytes) -> int:
        size = len(data) + OVERHEAD
        if self.kept_bytes and self.kept_bytes + size > self._settings.window:
            return 0
        self.sent += 1
        self.kept_bytes += size
        self._kept.append((self.sent, bytes(data)))
        return self.sent

    def lend(self, memory: ctypes.Array[ctypes.c_char]) -> int:
        self.sent += 1
        self._lent = self.sent
        self._kept.append((self.sent, memoryview(memory).cast("B")))
        return self.sent

    def take(self) -> bytes | None:
        return self._ready.popleft() if self._ready else None

    def begin_epoch(self, now: float, epoch: int, keeps: bool = False) -> bool:
        half = self._writing and self._writing_number and self._written
        keeps = keeps and self.state == UP and not half
        if not keeps:
            self._drop()
            self._forget_incoming()
        elif self._their_epoch != epoch:
            if self._in_body and not self._skip:
                self._skip = self._body_size - self.partial
            self._forget_incoming()
        if self._writing_number:
            self._writing, self._writing_number = b"", 0
        self._forget(now)
        self.epoch, self._due, self._announces = epoch, False, keeps
        return keeps

    def came(self, now: float, data: bytes) -> bool:
        while data:
            self._heard, self._carries = now, self.state == UP
            if self.state == GREETING:
                wanted = GREETING_FORMAT.size + DIGEST_BYTES - len(self._answer)
                self._answer, data = self._answer + data[:wanted], data[wanted:]
                whole = len(self._answer) == GREETING_FORMAT.size + DIGEST_BYTES
                if whole and not self._answered(now):
                    return False
            elif self.state != UP:
                return False
            elif not self._in_body:
                wanted = FRAME.size - len(self._head)
                self._head, data = self._head + data[:wanted], data[wanted:]
                if len(self._head) == FRAME.size and not self._begin_frame():
                    return False
            elif self._skip:
                taken = min(len(data), self._skip)
                data, self._skip = data[taken:], self._skip - taken
                self._in_body = self._skip != 0
            else:
                assert self._body is not None
                wanted = self._body_size - len(self._body)
                self._body += data[:wanted]
                data = data[wanted:]
                if len(self._body) == self._body_size:
                    self._complete()
        return True

    def gather(self, most: int) -> bytes:
        if self._control:
            return self._control[:most]
        if not self._writing and not self._begin_write():
            return b""
        return self._writing[:most]

    def wrote(self, now: float, n: int) -> None:
        self._said = now
        if self._control:
            self._control = self._control[n:]
            return
        self._writing, self._written = self._writing[n:], self._written + n
        if not self._writing:
            self._release()

    def _release(self) -> None:
        until = self.acked
        while self._kept and self._kept[0][0] <= until:
            _, data = self._kept.popleft()
            if isinstance(data, bytes):
                self.kept_bytes -= len(data) + OVERHEAD
            self._next = max(self._next - 1, 0)

    def _acknowledge(self, until: int) -> bool:
        if until > self.sent:
            return False
        if until > self._acked:
            self._acked = until
            self._release()
        return True

    def _up(self, now: float, expected: int, partial: int) -> bool:
        if expected == 0 or expected - 1 < self._acked or not self._acknowledge(expected - 1):
            return False
        begun = self._kept and self._kept[0][0] == expected
        if partial > (len(self._kept[0][1]) if begun else 0):
            return False
        self._resume, self._next, self.state = partial, 0, UP
        self._their_epoch = self.epoch
        self._heard = self._said = now
        self._pause, self._told, self._due = self._settings.first_pause, 0, True
        self._carries = False
        return True

    def _answered(self, now: float) -> bool:
        theirs, shown = (
            self._answer[: GREETING_FORMAT.size],
            self._answer[GREETING_FORMAT.size :],
        )
        magic, run, sender, to, epoch, expected, partial, _ = GREETING_FORMAT.unpack(theirs)
        if (magic, run, sender, to) != (MAGIC, self._me.run, self._peer, self._me.rank):
            return False
        secret = self._me.secret
        if epoch != self.epoch or not hmac.compare_digest(
            shown, proof(secret, b"a", self._mine, theirs)
        ):
            return False
        self._control += proof(secret, b"d", self._mine, theirs)
        took, most = FIRST_PATIENCE * (now - self._began), self._settings.greet
        self._patience = max(most / FIRST_PATIENCE, min(most, took))
        return self._up(now, expected, partial)

    def _begin_frame(self) -> bool:
        (kind, number, size, offset, ack), self._head = FRAME.unpack(self._head), b""
        if kind == EPOCH:
            if size or number <= self._their_epoch:
                return False
            self._their_epoch = number
            self._forget_incoming()
        if self._their_epoch == self.epoch and not self._acknowledge(ack):
            return False
        if kind in (ACK, EPOCH):
            return bool(size == 0)
        if kind != DATA or size > MOST_BYTES or offset > size:
            return False
        old = self._their_epoch < self.epoch
        if not number or (number > self.expected and not old):
            return False
        if number < self.expected or old:
            self._skip = size - offset
            self._in_body = self._skip != 0
            return True
        if self._body is None:
            if offset:
                return False
            self._body, self._body_size = bytearray(), size
        elif size != self._body_size or offset > len(self._body):
            return False
        del self._body[offset:]
        self._in_body = True
        if offset == size:
            self._complete()
        return True

    def _complete(self) -> None:
        assert self._body is not None
        size = len(self._body)
        self._ready.append(bytes(self._body))
        self._body, self._in_body = None, False
        self.expected += 1
        self._unsaid += size + OVERHEAD
        if size >= self._settings.prompt or self._unsaid >= self._settings.window // 4:
            self._due = True

    def _begin_write(self) -> bool:
        if self.state != UP:
            return False
        self._written = 0
        if self._announces:
            self._writing = FRAME.pack(EPOCH, self.epoch, 0, 0, self.expected - 1)
            self._writing_number, self._announces = 0, False
        elif self._next < len(self._kept):
            number, data = self._kept[self._next]
            self._next += 1
            head = FRAME.pack(DATA, number, len(data), self._resume, self.expected - 1)
            self._writing, self._writing_number = head + bytes(data[self._resume :]), number
            self._resume = 0
        elif self._due:
            self._writing, self._writing_number = FRAME.pack(ACK, 0, 0, 0, self.expected - 1), 0
        else:
            return False
        self._told, self._unsaid, self._due = self.expected - 1, 0, False
        return True


class Reception:
    """As `ecrm.kernels.links.Reception`."""

    def __init__(self, me: Identity) -> None:
        self._me, self._text = me, b""
        self._mine = self._theirs = b""
        self.sender = self.epoch = self.expected = self.partial = 0

    @property
    def wanted(self) -> int:
        return (DIGEST_BYTES if self._mine else GREETING_FORMAT.size) - len(self._text)

    def came(self, data: bytes) -> Step:
        self._text += data
        if self.wanted:
            return Step.MORE
        secret = self._me.secret
        if self._mine:
            right = hmac.compare_digest(self._text, proof(secret, b"d", self._theirs, self._mine))
            return Step.PROVED if right else Step.REFUSED
        self._theirs, self._text = self._text, b""
        magic, run, self.sender, to, self.epoch, self.expected, self.partial, _ = (
            GREETING_FORMAT.unpack(self._theirs)
        )
        known = (magic, run, to) == (MAGIC, self._me.run, self._me.rank)
        return Step.ASKS if known and self.sender < self._me.rank else Step.REFUSED

    def answer(self, epoch: int, expected: int, partial: int, nonce: bytes) -> bytes:
        self._mine = GREETING_FORMAT.pack(
            MAGIC, self._me.run, self._me.rank, self.sender, epoch, expected, partial, nonce
        )
        return self._mine + proof(self._me.secret, b"a", self._theirs, self._mine)

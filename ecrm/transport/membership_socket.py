"""The messages of head and members over UDP, each with a proof that its sender knows the secret.

A datagram is an HMAC-SHA-256, then JSON. Datagrams without the right proof, of another run or of
another form have no effect.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ecrm.transport.membership import Head, Member

DIGEST_BYTES = 32
MOST_BYTES = 65_507
"""The longest datagram of UDP: the places and numbers of 1,800 ranks."""
BEAT = struct.Struct("<Q16sQQQQ")
"""A beat of a rank, as `Beat` of kernels/links/carrier.h: magic, run, kind, rank, number, word.

The word of a beat is whether the rank has begun, of an answer the number of the head's state.
"""
BEAT_MAGIC = 0x3174616562726365
BEATS, ANSWERS = 1, 2
BUFFER_BYTES = 4 << 20
PASS_DATAGRAMS = 256
"""The most datagrams that the head takes before answering."""
MOST_WAITING = 64 * PASS_DATAGRAMS
"""The most datagrams in the buffer: the system doubles it, and counts at least 512 bytes each."""
WATCHER = 1 << 32
"""In the place of a rank: the process that watches the hosts."""
LINKS = "ECRM_LINKS"
"""The variable with the rendezvous of a run, as text."""


@dataclass(frozen=True)
class Rendezvous:
    """The run that a rank joins: its name and secret, the place of the head, and the keep-alive
    time in seconds.
    """

    run: bytes
    secret: bytes
    head: tuple[str, int]
    keep_alive: float

    def text(self) -> str:
        """The rendezvous as text, for a variable of the environment."""
        return json.dumps([self.run.hex(), self.secret.hex(), *self.head, self.keep_alive])

    @staticmethod
    def of_text(text: str) -> Rendezvous:
        """The rendezvous of a text."""
        run, secret, address, port, keep_alive = json.loads(text)
        return Rendezvous(bytes.fromhex(run), bytes.fromhex(secret), (address, port), keep_alive)

    def own_address(self) -> str:
        """The address of this host on the way to the head."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(self.head)
            address: str = probe.getsockname()[0]
        return address


def secret_to(secret: bytes, rank: int) -> bytes:
    """The secret of messages from the head to a rank: a message proves its receiver."""
    return secret + struct.pack("<Q", rank + 1)  # HMAC takes zeros at the end of a key for none


def sealed(secret: bytes, text: bytes) -> bytes:
    """The text with a proof."""
    return hmac.new(secret, text, hashlib.sha256).digest() + text


def unsealed(secret: bytes, datagram: bytes) -> bytes | None:
    """The text of a datagram with the right proof, else `None`."""
    text = datagram[DIGEST_BYTES:]
    right = hmac.new(secret, text, hashlib.sha256).digest()
    return text if hmac.compare_digest(datagram[:DIGEST_BYTES], right) else None


def encoded(run: bytes, secret: bytes, message: Mapping[str, Any]) -> bytes:
    """A message as a datagram."""
    return sealed(secret, _text_of(run, message))


def _text_of(run: bytes, message: Mapping[str, Any]) -> bytes:
    return json.dumps({**message, "run": run.hex()}).encode()


def decoded(run: bytes, secret: bytes, datagram: bytes) -> dict[str, Any] | None:
    """The message of a datagram; `None` for a datagram of a stranger, or of another run."""
    text = unsealed(secret, datagram)
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        message = json.loads(text)
        if isinstance(message, dict) and message.get("run") == run.hex():
            return message
    return None


class HeadServer:
    """The head on a UDP socket, in a thread of its own.

    A member numbers its messages, and a message with a number of before has no effect.
    `say` prints the lines of the head. `died` may be called by any thread.
    """

    def __init__(
        self,
        head: Head,
        run: bytes,
        secret: bytes,
        address: str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._head, self._run, self._secret, self._say, self._clock = (
            head,
            run,
            secret,
            say,
            clock,
        )
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._socket.bind((address, 0))
        self._socket.setblocking(False)
        self._where: dict[tuple[int, str], Any] = {}
        self._said: dict[tuple[int, str], int] = {}
        self._beats: dict[int, int] = {}
        self._refused, self._told_long, self._passes = False, False, 0
        self._encoded: tuple[Mapping[str, Any], bytes] = {}, b""
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="head", daemon=True)
        self._thread.start()

    @property
    def place(self) -> tuple[str, int]:
        """The address and port of the head."""
        address, port = self._socket.getsockname()
        return address, port

    def died(self, ranks: Collection[int]) -> None:
        """The death of these ranks is certain."""
        with self._lock:
            self._head.died(self._clock(), ranks)
            self._send()

    def close(self) -> None:
        """End the thread; members get no answers any more."""
        self._stopping = True
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._stopping:
            select.select([self._socket], [], [], self._head.next())
            with self._lock:
                self._pass()

    def _pass(self) -> None:
        """Take some datagrams, and answer."""
        empty = not all(self._receive() for _ in range(PASS_DATAGRAMS))
        self._passes = 0 if empty else self._passes + 1
        # behind all datagrams: a head that was stopped has its beats still to read
        if empty or self._passes * PASS_DATAGRAMS >= MOST_WAITING:
            self._passes = 0
            self._head.tick(self._clock())
        self._send()

    def _receive(self) -> bool:
        try:
            datagram, sender = self._socket.recvfrom(MOST_BYTES)
        except OSError:
            return False
        if self._answer_beats(datagram, sender):
            return True
        message = decoded(self._run, self._secret, datagram)
        if message is None:
            if not self._refused:
                self._refused = True
                self._say(f"ecrm: {sender[0]} is no member of this run: refused (told once)")
        elif message.get("is") == "died":  # of the process that watches the hosts
            self._head.hear_of_deaths(self._clock(), message.get("dead"))
        elif message.get("is") == "stop":
            self._head.stop = message.get("signal")
        elif message.get("is") == "members":
            live = len(self._head.live - self._head.dead - self._head.left)
            answer = {"is": "members", "number": message.get("number"), "live": live}
            proved = encoded(self._run, secret_to(self._secret, WATCHER), answer)
            self._send_to(proved, sender)
        elif message.get("is") == "gone":  # of the process that watches a host that has joined
            self._head.hear(self._clock(), message)
        elif isinstance(message.get("rank"), int) and isinstance(message.get("said"), int):
            of = message["rank"], str(message.get("life", ""))
            if message["said"] > self._said.get(
                of, 0
            ):  # not late, and not sent again by a stranger
                self._said[of], self._where[of] = message["said"], sender
                self._head.hear(self._clock(), message)
        return True

    def _answer_beats(self, datagram: bytes, sender: Any) -> bool:
        """Answer the beats of a rank, or of the ranks of a host, in one datagram.

        Returns whether the datagram has beats of this run.
        """
        size = BEAT.size + DIGEST_BYTES
        if not datagram or len(datagram) % size:
            return False
        beats = [datagram[first : first + size] for first in range(0, len(datagram), size)]
        news = self._head.news()
        answers = [self._answer(beat, news) for beat in beats]
        if any(answers):
            self._send_to(b"".join(filter(None, answers)), sender)
        return any(answer is not None for answer in answers)

    def _answer(self, beat: bytes, news: int) -> bytes | None:
        """The answer to a beat, empty if there is none; `None` if this is no beat of this run."""
        text, proof = beat[: BEAT.size], beat[BEAT.size :]
        magic, run, kind, rank, number, begun = BEAT.unpack(text)
        if (magic, run, kind) != (BEAT_MAGIC, self._run, BEATS):  # before the dearer proof
            return None
        if not hmac.compare_digest(proof, hmac.digest(self._secret, text, "sha256")):
            return None
        # a late or replayed beat is no sign of life
        if number > self._beats.get(rank, 0) and self._head.beat(self._clock(), rank, bool(begun)):
            self._beats[rank] = number
            answer = BEAT.pack(magic, run, ANSWERS, rank, number, news)
            return answer + hmac.digest(self._secret, answer, "sha256")
        return b""

    def _send(self) -> None:
        for rank, message in self._head.take():
            to = self._where.get((rank, message.get("life", "")))
            if to is not None:
                if message != self._encoded[0]:  # the places of all ranks go to all ranks alike
                    self._encoded = message, _text_of(self._run, message)
                proved = sealed(secret_to(self._secret, rank), self._encoded[1])
                self._send_to(proved, to)
        for line in self._head.lines:
            self._say(f"ecrm: {line}")
        self._head.lines.clear()

    def _send_to(self, datagram: bytes, to: Any) -> None:
        try:
            self._socket.sendto(datagram, to)
        except OSError as error:  # as a lost datagram: the member asks again
            if error.errno == errno.EMSGSIZE and not self._told_long:
                self._told_long = True
                self._say(
                    f"ecrm: a word of {len(datagram)} bytes fits no datagram: "
                    "launch again with fewer ranks (told once)"
                )


class MemberSocket:
    """A member on a UDP socket. `turn` moves messages; all waits are the caller's."""

    def __init__(
        self,
        member: Member,
        run: bytes,
        secret: bytes,
        address: str,
        head: tuple[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._member, self._run, self._secret, self._clock = member, run, secret, clock
        self._said = 0
        self._heads_secret = secret_to(secret, member.rank)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self.socket.bind((address, 0))
        self.socket.connect(head)
        self.socket.setblocking(False)

    def turn(self, unheard: Collection[int] | None = None, seconds: float = 0.0) -> None:
        """Send the messages that are due, and take the messages that have come.

        `unheard` is as for `Member.due`. Waits at most so many seconds for the first message.
        """
        for message in self._member.due(self._clock(), unheard):
            self._said += 1
            numbered = {**message, "said": self._said}
            with contextlib.suppress(OSError):  # as a lost datagram: said again
                self.socket.send(encoded(self._run, self._secret, numbered))
        if seconds:
            select.select([self.socket], [], [], seconds)
        while True:
            try:
                datagram = self.socket.recv(MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:  # told of an earlier datagram that did not arrive
                continue
            answer = decoded(self._run, self._heads_secret, datagram)
            if answer is not None:
                self._member.hear(answer)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

"""Head and members over UDP, and the lease of a process that beats by its carrier."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ecrm.transport.membership import Head, Member, Phase
from ecrm.transport.membership_socket import (
    BEAT,
    BEAT_MAGIC,
    BEATS,
    HeadServer,
    MemberSocket,
    decoded,
    encoded,
    sealed,
    secret_to,
    unsealed,
)
from support.paths import ROOT

RUN, SECRET = b"run of the tests", b"secret of the run"
ADDRESS = "127.0.0.1"
KEEP_ALIVE = 1.0
SECONDS = 10.0


def test_only_what_was_sealed_with_the_secret_is_taken() -> None:
    message = {"is": "want", "rank": 3}
    datagram = encoded(RUN, SECRET, message)
    assert decoded(RUN, SECRET, datagram) == {**message, "run": RUN.hex()}
    assert decoded(RUN, b"another", datagram) is None
    assert decoded(b"another run ....", SECRET, datagram) is None
    assert unsealed(SECRET, b"") is None and unsealed(SECRET, bytes(80)) is None
    for place in range(len(datagram)):
        changed = bytearray(datagram)
        changed[place] ^= 1
        assert decoded(RUN, SECRET, bytes(changed)) is None
    assert decoded(RUN, SECRET, sealed(SECRET, b"no JSON")) is None
    assert decoded(RUN, SECRET, sealed(SECRET, b"[]")) is None


class Served:
    def __init__(self, ranks: int) -> None:
        self.lines: list[str] = []
        self.head = Head(["h1"] * ranks, KEEP_ALIVE)
        self.server = HeadServer(self.head, RUN, SECRET, ADDRESS, self.lines.append)


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served(2)
    yield found
    found.server.close()


def test_members_join_and_survive_a_death(served: Served) -> None:
    members = [Member(rank, [ADDRESS, 1000 + rank]) for rank in (0, 1)]
    sockets = [
        MemberSocket(member, RUN, SECRET, ADDRESS, served.server.place) for member in members
    ]
    turn_until(sockets, lambda: all(member.phase is Phase.LIVE for member in members))
    assert members[0].places == [[ADDRESS, 1000], [ADDRESS, 1001]]
    served.server.died([1])
    turn_until(sockets[:1], lambda: members[0].revoked)
    members[0].want()
    turn_until(sockets[:1], members[0].begun)
    assert (members[0].epoch, members[0].live) == (2, (0,))
    turn_until(sockets, lambda: members[1].fenced)
    members[0].leave()
    turn_until(sockets, members[0].all_left)
    for each in sockets:
        each.close()


def test_a_message_to_one_rank_has_no_effect_on_another(served: Served) -> None:
    """A fence for rank 1 is given to rank 0, as from a recording."""
    members = [Member(rank, [ADDRESS, 1000 + rank]) for rank in (0, 1)]
    head = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    head.bind((ADDRESS, 0))
    fence = encoded(RUN, secret_to(SECRET, 1), {"is": "fence", "epoch": 1})
    assert decoded(RUN, SECRET, encoded(RUN, secret_to(SECRET, 0), {})) is None
    for member in members:
        turns = MemberSocket(member, RUN, SECRET, ADDRESS, head.getsockname())
        head.sendto(fence, turns.socket.getsockname())
        turns.turn(None, 0.2)
        turns.close()
    assert [member.fenced for member in members] == [False, True]
    head.close()


def test_a_replayed_beat_is_no_sign_of_life(served: Served) -> None:
    beats = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    beats.connect(served.server.place)
    beats.settimeout(SECONDS)

    def beat(number: int) -> None:
        text = BEAT.pack(BEAT_MAGIC, RUN, BEATS, 0, number, 0)
        beats.send(text + hmac.new(SECRET, text, hashlib.sha256).digest())

    for number in (5, 5, 4, 6):
        beat(number)
    answers = [BEAT.unpack(beats.recv(100)[: BEAT.size])[4] for _ in range(2)]
    assert answers == [5, 6]
    beats.close()


def test_a_replayed_word_of_a_member_has_no_effect(served: Served) -> None:
    """Neither on the head's knowledge, nor on the place where the head answers."""
    member = Member(0, [ADDRESS, 1000])
    turns = MemberSocket(member, RUN, SECRET, ADDRESS, served.server.place)
    heard: list[dict] = []
    served.head.hear = lambda now, message: heard.append(message)  # type: ignore[method-assign]
    stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    stranger.connect(served.server.place)

    def say(sender, number: int) -> None:
        word = {"is": "unheard", "rank": 0, "epoch": 1, "peers": [1], "said": number}
        sender.send(encoded(RUN, SECRET, word))

    try:
        for number in (1, 2):
            say(turns.socket, number)
        until(lambda: len(heard) == 2)
        for number in (1, 2, 2):
            say(stranger, number)
        stranger.send(encoded(RUN, SECRET, {"is": "unheard", "rank": 0, "epoch": 1, "peers": [1]}))
        say(turns.socket, 3)
        until(lambda: len(heard) == 3)
        assert [message["said"] for message in heard] == [1, 2, 3]
        served.head.outbox[0, "", "fence"] = {"is": "fence", "epoch": 1}
        served.server.died([])
        until(lambda: turns.turn() or member.fenced)
    finally:
        stranger.close()
        turns.close()


def test_a_word_too_long_for_a_datagram_is_told_of_once() -> None:
    served = Served(2)
    member = MemberSocket(Member(0, [ADDRESS, 1]), RUN, SECRET, ADDRESS, served.server.place)
    try:
        member.turn()
        until(lambda: served.server._where)
        for _ in range(3):
            served.head.outbox[0, "", "new"] = {"is": "new", "live": [10**9] * 9000}
            served.server.died([])
        (line,) = served.lines
        assert "fits no datagram: launch again with fewer ranks (told once)" in line
    finally:
        member.close()
        served.server.close()


def until(done) -> None:
    deadline = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def turn_until(sockets: list[MemberSocket], until) -> None:
    deadline = time.monotonic() + SECONDS
    while not until():
        assert time.monotonic() < deadline
        for each in sockets:
            each.turn(None, 0.005)


def test_a_stranger_is_told_of_once_and_has_no_effect(served: Served) -> None:
    stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    stranger.connect(served.server.place)
    wrong = {"is": "want", "rank": 0, "epoch": 1}
    for datagram in (b"", b"GET /", bytes(80), encoded(RUN, b"guess", wrong), bytes(60_000)):
        for _ in range(50):
            stranger.send(datagram)
    test_members_join_and_survive_a_death(served)
    assert served.lines == [f"ecrm: {ADDRESS} is no member of this run: refused (told once)"]
    stranger.close()


def test_a_head_under_a_flood_answers_and_looks_at_leases(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Datagrams come without end: the socket is never empty."""
    server = served.server
    server.close()
    looks: list[float] = []
    monkeypatch.setattr(served.head, "tick", looks.append)
    taken = itertools.count(1)
    monkeypatch.setattr(server, "_receive", lambda: next(taken) < 10**6)
    sent: list[int] = []
    monkeypatch.setattr(server, "_send", lambda: sent.append(next(taken)))
    for _ in range(128):
        server._pass()
    assert len(sent) == 128 and sent[0] == 257 and len(looks) == 2


BEATING = f"""
import sys, time
from ecrm.kernels.links import Identity, Settings
from ecrm.transport.carrier import Carrier
carrier = Carrier(Identity({RUN!r}, {SECRET!r}, 0), 2, Settings(), {ADDRESS!r})
begins = sys.argv[2] == "begins"
carrier.lease({ADDRESS!r}, int(sys.argv[1]), 60.0 if begins else {KEEP_ALIVE})
if begins:
    time.sleep(1.0)
    carrier.begin_lease({KEEP_ALIVE})
print("beats", flush=True)
if sys.argv[2] == "leaves":
    carrier.end_lease()
while True:
    if sys.argv[2] == "calls":
        carrier.flush(0.0)  # done at once, again and again: no wait looks at the lease
    else:  # no call of the carrier
        time.sleep(0.01)
"""


@pytest.mark.parametrize("what", ["stays", "leaves", "calls", "begins"])
def test_a_process_without_answers_of_the_head_kills_itself(what: str) -> None:
    served = Served(2)
    process = subprocess.Popen(
        [sys.executable, "-c", BEATING, str(served.server.place[1]), what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "beats\n"
        time.sleep(1.5 * KEEP_ALIVE)
        assert process.poll() is None, "the head answers"
        assert served.head._leased == ({0} if what == "begins" else set())
        silent_since = time.monotonic()
        served.server.close()
        if what == "leaves":
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.5 * KEEP_ALIVE)
            return
        assert process.wait(SECONDS) == -9
        assert 0.7 * KEEP_ALIVE < time.monotonic() - silent_since < KEEP_ALIVE
        assert process.stderr is not None
        assert process.stderr.read() == (
            "ecrm: rank 0: no answer of the head machine in time: rank killed\n"
        )
    finally:
        process.kill()
        process.communicate()


def test_a_fenced_process_gets_no_answers_any_more() -> None:
    served = Served(2)
    process = subprocess.Popen(
        [sys.executable, "-c", BEATING, str(served.server.place[1]), "stays"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None and process.stdout.readline()
        served.head.fenced.add(0)
        assert process.wait(SECONDS) == -9
    finally:
        process.kill()
        process.communicate()
        served.server.close()

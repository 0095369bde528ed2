"""The beats of a host's ranks, carried to the head by the agent of the host, over real sockets."""

from __future__ import annotations

import hashlib
import hmac
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ecrm.process import remote_agent
from ecrm.process.remote_agent import BEATS_TO, DIGEST_BYTES, Beats
from ecrm.transport import membership_socket
from ecrm.transport.membership import Head
from ecrm.transport.membership_socket import (
    ANSWERS,
    BEAT,
    BEAT_MAGIC,
    BEATS,
    HeadServer,
    Rendezvous,
)
from support.paths import ROOT

RUN, SECRET = b"run of the tests", b"secret of the run"
ADDRESS = "127.0.0.1"
KEEP_ALIVE = 1.0
SECONDS = 10.0
HOSTS, RANKS = 14, 1000


class Counted(HeadServer):
    """A head that counts its datagrams."""

    def __init__(self, ranks: int) -> None:
        self.head, self.datagrams, self.lines = Head(["h"] * ranks, KEEP_ALIVE), 0, []
        super().__init__(self.head, RUN, SECRET, ADDRESS, self.lines.append)

    def _receive(self) -> bool:
        took = super()._receive()
        self.datagrams += took
        return took

    def agent(self) -> Beats:
        return Beats(Rendezvous(RUN, SECRET, self.place, KEEP_ALIVE).text())


@pytest.fixture
def server() -> Iterator[Counted]:
    found = Counted(RANKS)
    yield found
    found.close()


def beat(rank: int, number: int, kind: int = BEATS, news: int = 0, secret: bytes = SECRET) -> bytes:
    text = BEAT.pack(BEAT_MAGIC, RUN, kind, rank, number, news)
    return text + hmac.new(secret, text, hashlib.sha256).digest()


class RanksOfAHost:
    """Ranks that beat from one socket to a place, and collect the answers."""

    def __init__(self, to: tuple[str, int]) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self.socket.connect(to)
        self.socket.setblocking(False)
        self.answers: dict[int, int] = {}

    def say(self, *datagrams: bytes) -> None:
        for datagram in datagrams:
            self.socket.send(datagram)

    def hear(self) -> int:
        for datagram, _ in remote_agent._datagrams(self.socket):
            _, _, _, rank, number, news = BEAT.unpack_from(datagram)
            assert datagram == beat(rank, number, ANSWERS, news)
            self.answers[rank] = number
        return len(self.answers)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def place_of(agent: Beats) -> tuple[str, int]:
    address, port = agent.place.split(":")
    return address, int(port)


def test_agent_and_head_have_the_same_names_and_forms() -> None:
    assert remote_agent.LINKS == membership_socket.LINKS
    assert (Beats.FORM.format, Beats.MAGIC, Beats.KIND) == (BEAT.format, BEAT_MAGIC, BEATS)
    assert remote_agent.DIGEST_BYTES == membership_socket.DIGEST_BYTES


def test_a_beat_of_a_thousand_ranks_is_six_datagrams_of_each_host(server: Counted) -> None:
    """The twin: without agents a datagram of each rank."""
    alone = RanksOfAHost(server.place)
    for rank in range(RANKS):
        alone.say(beat(rank, 1))
        if rank % 100 == 99:  # no more than the socket of the system holds
            until(lambda: alone.hear() == rank + 1)
    assert server.datagrams == RANKS

    server.datagrams = 0
    agents = [server.agent() for _ in range(HOSTS)]
    hosts = [RanksOfAHost(place_of(agent)) for agent in agents]
    for rank in range(RANKS):
        hosts[rank % HOSTS].say(beat(rank, 2))
    for agent in agents:
        agent.say()
    for agent, host in zip(agents, hosts):
        until(lambda: agent.hand_out() or host.hear() in (71, 72))
    assert server.datagrams == HOSTS * 6  # 71 or 72 ranks, 12 to a datagram
    assert Beats.MOST == 12
    heard = {rank: number for host in hosts for rank, number in host.answers.items()}
    assert heard == dict.fromkeys(range(RANKS), 2)
    assert server.lines == []
    for each in (alone, *hosts):
        each.socket.close()


def test_only_the_last_proved_beat_of_a_rank_is_carried(server: Counted) -> None:
    """A stranger, a replay and a fenced rank take nothing from the other ranks."""
    agent = server.agent()
    host = RanksOfAHost(place_of(agent))
    host.say(b"", b"GET /", beat(3, 5, secret=b"guess"), bytes(BEAT.size + DIGEST_BYTES))
    host.say(beat(3, 5, ANSWERS))
    host.say(beat(1, 7), beat(1, 8), beat(1, 6), beat(2, 4))
    server.head.fenced.add(2)
    agent.say()
    until(lambda: agent.hand_out() or host.hear())
    assert host.answers == {1: 8} and server.datagrams == 1 and server.lines == []
    host.say(beat(1, 9), beat(1, 8))
    agent.say()  # too early
    assert server.datagrams == 1
    until(lambda: agent.say() or agent.hand_out() or (host.hear() and host.answers[1] == 9))
    assert 2 not in host.answers
    host.socket.close()


def test_a_sender_without_pause_does_not_keep_the_agent(server: Counted) -> None:
    """And no other host reaches the agent."""
    agent = server.agent()
    assert place_of(agent)[0].startswith("127.")
    stranger, taken = RanksOfAHost(place_of(agent)), 0

    class Endless:
        def recvfrom(self, size: int) -> tuple[bytes, None]:
            nonlocal taken
            taken += 1
            stranger.say(b"more")
            return agent._here.recvfrom(size)

    stranger.say(b"first")
    for _ in remote_agent._datagrams(Endless()):  # type: ignore[arg-type]
        pass
    assert taken == remote_agent._MOST_WAITING > 10_000
    stranger.socket.close()


BEATING = f"""
import os, sys, time
from ecrm.kernels.links import Identity, Settings
from ecrm.transport.carrier import Carrier
carrier = Carrier(Identity({RUN!r}, {SECRET!r}, int(sys.argv[1])), 2, Settings(), {ADDRESS!r})
address, port = os.environ[{BEATS_TO!r}].split(":")
carrier.lease(address, int(port), {KEEP_ALIVE})
print("beats", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("which", ["head", "agent"])
def test_a_rank_without_answers_through_its_agent_kills_itself(server: Counted, which: str) -> None:
    """Whether the head or the agent is silent; and no earlier."""
    agent, stopped = server.agent(), threading.Event()

    def carries() -> None:
        while not stopped.wait(min(agent.next(), 0.01)):
            agent.say()
            agent.hand_out()

    carrying = threading.Thread(target=carries)
    carrying.start()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BEATING, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={BEATS_TO: agent.place},
        )
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "beats\n"
        time.sleep(1.5 * KEEP_ALIVE)
        assert [rank.poll() for rank in ranks] == [None, None], "the head answers"
        server.head.fenced.add(1)
        assert ranks[1].wait(SECONDS) == -9 and ranks[0].poll() is None, "each its own lease"
        silent_since = time.monotonic()
        if which == "head":
            server.close()
        else:
            stopped.set()
        assert ranks[0].wait(SECONDS) == -9
        assert 0.6 * KEEP_ALIVE < time.monotonic() - silent_since < KEEP_ALIVE
    finally:
        stopped.set()
        carrying.join()
        for rank in ranks:
            rank.kill()
            rank.communicate()

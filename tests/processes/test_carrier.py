"""The carrier of links: real sockets and threads, in one process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from ecrm.base.errors import EcrmError
from ecrm.kernels.links import Identity, Link, Settings
from ecrm.transport.carrier import Carrier
from support.paths import ROOT

RUN, SECRET = b"run of the tests", b"secret of the run"
ADDRESS = "127.0.0.1"
SECONDS = 10.0


@pytest.fixture
def carriers() -> Iterator[list[Carrier]]:
    settings = Settings(silence=0.4, beat=0.05)
    found = [Carrier(Identity(RUN, SECRET, rank), 3, settings, ADDRESS) for rank in range(3)]
    for carrier in found:
        for rank, other in enumerate(found):
            if other is not carrier:
                carrier.peer(rank, ADDRESS, other.port)
    for carrier in found:
        carrier.begin_epoch(1, (0, 1, 2))
    yield found
    for carrier in found:
        carrier.close()


def sent(carrier: Carrier, to: int, data: bytes, lend: bool = False) -> np.ndarray:
    memory = np.frombuffer(data, np.uint8)
    assert carrier.send(to, memory, lend)
    return memory


def came(carrier: Carrier, sender: int) -> bytes:
    message = carrier.receive(sender, SECONDS)
    assert message is not None
    return message.tobytes()


def test_messages_of_all_sizes_come_from_every_peer(carriers: list[Carrier]) -> None:
    for size in (0, 1, 1000, 100_000, 1_000_000):
        lent = [
            sent(carrier, to, Random(10 * rank + to).randbytes(size), lend=size > 50_000)
            for rank, carrier in enumerate(carriers)
            for to in {0, 1, 2} - {rank}
        ]
        for rank, carrier in enumerate(carriers):
            for sender in {0, 1, 2} - {rank}:
                assert came(carrier, sender) == Random(10 * sender + rank).randbytes(size)
        assert all(carrier.flush(SECONDS) for carrier in carriers)
        del lent
    assert carriers[0].receive(1, 0.001) is None
    assert all(carrier.figures().losses == 0 for carrier in carriers)


def test_connections_that_are_cut_cost_no_message(carriers: list[Carrier]) -> None:
    draw = Random(1)
    messages = [draw.randbytes(draw.randrange(200_000)) for _ in range(50)]
    cuts = 0
    for number, message in enumerate(messages):
        sent(carriers[0], 1, message)
        sent(carriers[1], 0, message)
        if number % 5 == 0:
            end = draw.randrange(2)
            cuts += carriers[end].cut(1 - end)
        assert came(carriers[1], 0) == message
        assert came(carriers[0], 1) == message
    assert cuts > 4
    assert carriers[0].figures().losses > 4
    assert carriers[0].all_acked(SECONDS) and carriers[0].figures().kept_bytes == 0


def test_a_rank_that_computes_is_no_rank_that_is_away(carriers: list[Carrier]) -> None:
    """No call for longer than the silence, with a message that no call reads."""
    sent(carriers[0], 1, b"first")
    assert came(carriers[1], 0) == b"first"
    held = sent(carriers[0], 1, bytes(8 << 20), lend=True)
    time.sleep(0.8)
    assert carriers[0].flush(0.0), "the thread of the other rank has taken the message"
    assert all(carrier.figures().losses == 0 for carrier in carriers)
    assert carriers[0].down(1) == 0
    del held


def test_a_peer_that_says_nothing_is_down_and_comes_back(carriers: list[Carrier]) -> None:
    """The twin: without a thread a link is broken after the silence."""
    silent = socket.create_server((ADDRESS, 0))
    alone = Carrier(Identity(RUN, SECRET, 0), 2, Settings(silence=0.1, greet=0.1), ADDRESS)
    alone.peer(1, ADDRESS, silent.getsockname()[1])
    alone.begin_epoch(1, (0, 1))
    time.sleep(0.3)
    assert alone.down(1) > 0.25
    alone.close()
    silent.close()


def test_a_new_epoch_drops_messages_and_leaves_out_the_dead(carriers: list[Carrier]) -> None:
    sent(carriers[0], 1, b"old")
    for carrier in (carriers[0], carriers[1]):
        carrier.begin_epoch(2, (0, 1))
    sent(carriers[0], 1, b"new")
    assert came(carriers[1], 0) == b"new"
    sent(carriers[2], 1, b"from the past")
    assert carriers[1].receive(2, 0.1) is None
    assert carriers[1].figures().refused == 0, "a peer of another epoch is no stranger"


def sockets_here() -> set[str]:
    """The sockets of this process."""
    found = set()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{each}"))
    return {each for each in found if each.startswith("socket:")}


def test_a_new_epoch_keeps_the_connections_of_ranks_that_live_on(carriers: list[Carrier]) -> None:
    """The connections to rank 2 end; the twin is an epoch with a rank that comes back."""
    for sender in (0, 1):
        for to in {0, 1, 2} - {sender}:
            sent(carriers[sender], to, b"all are connected")
            assert came(carriers[to], sender) == b"all are connected"
    before = sockets_here()
    for epoch, live in ((2, (0, 1)), (3, (0, 1))):
        for carrier in carriers[:2]:
            carrier.begin_epoch(epoch, live)
            sent(carrier, 1 - carriers.index(carrier), b"early or late")
        for end in (0, 1):
            assert came(carriers[end], 1 - end) == b"early or late"
    kept = sockets_here()
    assert kept < before and [carrier.figures().losses for carrier in carriers[:2]] == [0, 0]
    for carrier in carriers:
        carrier.begin_epoch(4, (0, 1, 2))
    sent(carriers[0], 2, b"again")
    assert came(carriers[2], 0) == b"again" and sockets_here() - kept


def test_a_full_window_refuses_until_the_peer_acknowledges(carriers: list[Carrier]) -> None:
    alone = Carrier(Identity(RUN, SECRET, 0), 2, Settings(window=100_000), ADDRESS)
    alone.begin_epoch(1, (0, 1))  # nobody is there
    memory = np.zeros(60_000, np.uint8)
    assert alone.send(1, memory, lend=False) and not alone.send(1, memory, lend=False)
    assert alone.figures().kept_bytes < 100_000
    alone.close()


def test_strangers_are_refused_without_effect(carriers: list[Carrier]) -> None:
    port = carriers[1].port
    greeting = Link(Identity(RUN, b"another secret", 0), 1, Settings())
    greeting.begin_epoch(0.0, 1)
    greeting.dialling(0.0)
    greeting.dialled(0.0, bytes(16))
    said = [Random(1).randbytes(200), greeting.gather(200), b"", b"GET / HTTP/1.1\r\n" * 10]
    waiting = []
    for number in range(1000):
        stranger = socket.create_connection((ADDRESS, port))
        stranger.sendall(said[number % len(said)])
        waiting.append(stranger)
        if len(waiting) > 100:
            waiting.pop(0).close()
    sent(carriers[0], 1, b"still there")
    assert came(carriers[1], 0) == b"still there"
    figures = carriers[1].figures()
    assert figures.losses == 0 and figures.refused >= 250 and figures.silent > 100
    assert figures.refused_address == figures.silent_address == ADDRESS
    for stranger in waiting:
        stranger.close()
    assert len(os.listdir("/proc/self/fd")) < 200


def test_all_ranks_of_a_large_run_may_greet_at_once() -> None:
    alone = Carrier(Identity(RUN, SECRET, 0), 200, Settings(greet=SECONDS), ADDRESS)
    waiting = [socket.create_connection((ADDRESS, alone.port)) for _ in range(150)]
    late = socket.create_connection((ADDRESS, alone.port))
    late.sendall(bytes(72))
    deadline = time.monotonic() + SECONDS
    while not alone.figures().refused:  # accepted behind all others
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert alone.figures().silent == 0, "nobody had to give way"
    for each in (*waiting, late):
        each.close()
    alone.close()


def test_a_carrier_listens_on_its_address_alone(carriers: list[Carrier]) -> None:
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", carriers[0].port), timeout=1.0)
    with pytest.raises(EcrmError, match=r"cannot listen on 198\.18\.0\.1: Cannot assign"):
        Carrier(Identity(RUN, SECRET, 0), 2, Settings(), "198.18.0.1")
    with pytest.raises(ValueError, match="rank 1: 'here' is no IPv4 address"):
        carriers[0].peer(1, "here", 1)


def test_closing_ends_the_thread_and_closes_the_files() -> None:
    files, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(3):
        Carrier(Identity(RUN, SECRET, 0), 2, Settings(), ADDRESS).close()
    assert len(os.listdir("/proc/self/fd")) == files
    assert len(os.listdir("/proc/self/task")) == threads


def test_a_connection_ends_although_a_forked_process_holds_it(carriers: list[Carrier]) -> None:
    """Data workers are forks. The peer hears of the end, and no closed socket wakes the rank."""
    peer = socket.create_server((ADDRESS, 0))
    peer.settimeout(SECONDS)
    alone = Carrier(Identity(RUN, SECRET, 0), 2, Settings(), ADDRESS)
    alone.peer(1, ADDRESS, peer.getsockname()[1])
    alone.begin_epoch(1, (0, 1))
    connection, _ = peer.accept()
    reading, writing = os.pipe()
    fork = os.fork()
    if not fork:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        alone.begin_epoch(2, (0,))
        connection.settimeout(2.0)
        while connection.recv(1 << 16):
            pass
        connection.close()
        busy = time.process_time()
        assert alone.receive(1, 0.3) is None
        assert time.process_time() - busy < 0.15
        port = alone.port
        alone.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((ADDRESS, port), timeout=2.0)
    finally:
        os.close(writing)
        os.waitpid(fork, 0)
        os.close(reading)
        peer.close()


def test_a_stopped_rank_reads_before_a_link_is_given_up() -> None:
    """The bytes of the peer wait in the socket: the silence was the own one."""
    patient = Settings(silence=20.0, beat=0.05)
    peer = Carrier(Identity(RUN, SECRET, 1), 2, patient, ADDRESS)
    stopped = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(peer.port)], stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert stopped.stdout is not None
        peer.peer(0, ADDRESS, int(stopped.stdout.readline()))
        peer.begin_epoch(1, (0, 1))
        assert came(peer, 0) == b"here"
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        stopped.send_signal(signal.SIGCONT)
        assert came(peer, 0) == b"losses 0"
    finally:
        stopped.kill()
        stopped.communicate()
        peer.close()


STOPPED = f"""
import sys, time
import numpy as np
from ecrm.kernels.links import Identity, Settings
from ecrm.transport.carrier import Carrier
carrier = Carrier(Identity({RUN!r}, {SECRET!r}, 0), 2, Settings(silence=0.4, beat=0.1), {ADDRESS!r})
print(carrier.port, flush=True)
carrier.peer(1, {ADDRESS!r}, int(sys.argv[1]))
carrier.begin_epoch(1, (0, 1))
carrier.send(1, np.frombuffer(b"here", np.uint8), False)
before = now = time.monotonic()
while now - before < 0.6:  # until it was stopped
    time.sleep(0.01)
    before, now = now, time.monotonic()
time.sleep(0.2)
carrier.send(1, np.frombuffer(b"losses %d" % carrier.figures().losses, np.uint8), False)
time.sleep(60)
"""


def test_a_rank_without_files_waits_for_files_and_says_so_once() -> None:
    short = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_FILES],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert short.stdout is not None
        stranger = socket.create_connection((ADDRESS, int(short.stdout.readline())))
        stranger.sendall(bytes(72))
        said, told = short.communicate(timeout=SECONDS)
        busy, refused = said.split()
        assert float(busy) < 0.2 and int(refused) == 1, "taken once there were files"
        assert told.count("has no file left for a connection: raise ulimit -n (told once)") == 1
        stranger.close()
    finally:
        short.kill()
        short.communicate()


WITHOUT_FILES = f"""
import os, resource, time
from ecrm.kernels.links import Identity, Settings
from ecrm.transport.carrier import Carrier
carrier = Carrier(Identity({RUN!r}, {SECRET!r}, 0), 2, Settings(greet=10.0), {ADDRESS!r})
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
print(carrier.port, flush=True)
busy = time.process_time()
carrier.receive(1, 0.6)
busy = time.process_time() - busy
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
carrier.receive(1, 0.3)
print(busy, carrier.figures().refused, flush=True)
os._exit(0)
"""


def test_a_wait_ends_early_for_what_is_watched(carriers: list[Carrier]) -> None:
    reading, writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    carriers[0].watch(reading)
    threading.Timer(0.05, writing.send, (b"!",)).start()
    began = time.monotonic()
    assert carriers[0].receive(1, SECONDS) is None
    assert 0.04 < time.monotonic() - began < 5
    for each in (reading, writing):
        each.close()

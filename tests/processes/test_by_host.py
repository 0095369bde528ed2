"""Messages gathered by host, over real sockets: ranks are processes, hosts have own addresses."""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ecrm.transport.base import PeerFailure
from ecrm.transport.links import LinkTransport
from ecrm.transport.membership import Head
from ecrm.transport.membership_socket import HeadServer, Rendezvous

SECONDS = 60.0


class Hosts:
    """Ranks on hosts of so many ranks each; host i has the address 127.0.0.(2 + i)."""

    def __init__(self, tmp_path: Path, *ranks: int, least: int = 1) -> None:
        self.host_of = [host for host, count in enumerate(ranks) for _ in range(count)]
        self.results, self.pids = tmp_path, dict[int, int]()
        self.run, self.secret, self.least = secrets.token_bytes(16), secrets.token_bytes(32), least
        head = Head([f"h{host}" for host in self.host_of], 2.0)
        self.server = HeadServer(head, self.run, self.secret, "127.0.0.1", print)

    def start(self, work: Callable[[LinkTransport], Any]) -> None:
        """Fork the ranks; each writes the result of its work, as JSON."""
        rendezvous = Rendezvous(self.run, self.secret, self.server.place, 2.0)
        for rank, host in enumerate(self.host_of):
            self.pids[rank] = pid = os.fork()
            if not pid:
                try:
                    torch.set_num_threads(1)
                    LinkTransport.least_ranks = self.least
                    Rendezvous.own_address = lambda _, host=host: f"127.0.0.{2 + host}"
                    transport = LinkTransport(rank, len(self.host_of), rendezvous)
                    self._result(rank).write_text(json.dumps(work(transport)))
                    transport.close()
                finally:
                    os._exit(0)

    def finish(self, *killed: int) -> list[Any]:
        """The results of all ranks but the killed ranks."""
        deadline = time.monotonic() + SECONDS
        for rank, pid in self.pids.items():
            while not os.waitpid(pid, os.WNOHANG)[0]:
                if time.monotonic() > deadline:
                    for each in self.pids.values():
                        os.kill(each, signal.SIGKILL)
                    raise AssertionError(f"rank {rank} hangs")
                time.sleep(0.01)
        self.server.close()
        return [
            json.loads(self._result(rank).read_text()) for rank in self.pids if rank not in killed
        ]

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)
        self.server.died([rank])

    def _result(self, rank: int) -> Path:
        return self.results / f"{rank}.json"


def numbers(sender: int, receiver: int, call: int) -> list[torch.Tensor]:
    """What a rank sends in a call: nothing, little, and much, by the place of sender and call."""
    size = (0, 3, 1000, 20_000)[(sender + 2 * receiver + call) % 4]
    return [torch.full((size,), float(100 * sender + receiver + 1000 * call)), torch.arange(call)]


def check(transport: LinkTransport, call: int) -> None:
    """An exchange and a share with all live ranks."""
    me = transport.rank
    came = transport.exchange({rank: numbers(me, rank, call) for rank in transport.live})
    for sender in transport.live:
        for tensor, right in zip(came[sender], numbers(sender, me, call), strict=True):
            assert torch.equal(tensor, right), (sender, me, call)
    shared = transport.share([torch.arange(me + call)])
    assert [len(shared[rank][0]) for rank in transport.live] == [
        rank + call for rank in transport.live
    ]


def counts(transport: LinkTransport, work: Callable[[], object]) -> tuple[int, int]:
    """The messages that a rank sends to other hosts in a work, and all its messages."""
    sent, send = list[bool](), transport._send
    host = transport._member.places[transport.rank][0]

    def counting(rank: int, memory: np.ndarray) -> None:
        sent.append(transport._member.places[rank][0] != host)
        send(rank, memory)

    transport._send = counting  # type: ignore[method-assign]
    work()
    transport._send = send  # type: ignore[method-assign]
    return sum(sent), len(sent)


@pytest.mark.parametrize(
    ("least", "far", "near"),
    [(1, 3 * 2, 12 * 3 + 3 * 2 * (3 + 3)), (5, 12 * 8, 12 * 3)],
    ids=["gathered", "few ranks"],
)
def test_an_exchange_is_a_message_of_each_pair_of_hosts(
    tmp_path: Path, least: int, far: int, near: int
) -> None:
    """Parts are handed over and spread within hosts. The twin: a message of each pair of ranks."""
    hosts = Hosts(tmp_path, 4, 4, 4, least=least)

    def work(transport: LinkTransport) -> tuple[int, int]:
        to_all = {rank: [torch.ones(5)] for rank in transport.live}
        return counts(transport, lambda: transport.exchange(to_all))

    hosts.start(work)
    of_ranks = hosts.finish()
    assert sum(each[0] for each in of_ranks) == far
    assert sum(each[1] for each in of_ranks) == far + near


def test_gathered_messages_of_all_sizes_arrive(tmp_path: Path) -> None:
    """Also between hosts with different numbers of ranks; one host has too few to gather."""
    hosts = Hosts(tmp_path, 3, 1, 4, 2, least=2)

    def work(transport: LinkTransport) -> bool:
        for call in range(6):
            check(transport, call)
        return transport.agree(True)

    hosts.start(work)
    assert hosts.finish() == [True] * 10


@pytest.mark.parametrize("killed", [0, 1, 4])
def test_a_gatherer_that_dies_in_an_exchange_is_replaced(tmp_path: Path, killed: int) -> None:
    """Ranks 0 and 1 gather for the other hosts, rank 4 spreads; all the others go on."""
    hosts = Hosts(tmp_path, 3, 3, 3)
    began = tmp_path / "began"

    def work(transport: LinkTransport) -> list[int]:
        call, after = 0, 0
        while after < 3:
            try:
                check(transport, call)
                transport.agree(True)
                call, after = call + 1, after + (len(transport.live) < 9)
                if call == 4:
                    began.touch()
            except PeerFailure:
                transport.shrink()
                call = 0
        gatherers = [far.gatherer for far in transport._routes.far]
        assert killed not in gatherers and len(gatherers) == 2
        return list(transport.live)

    hosts.start(work)
    deadline = time.monotonic() + SECONDS
    while not began.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    hosts.kill(killed)
    assert hosts.finish(killed) == [[rank for rank in range(9) if rank != killed]] * 8

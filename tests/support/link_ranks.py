"""Ranks on links without mpirun: processes of this machine, and a head that hears of their ends."""

from __future__ import annotations

import os
import random
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ecrm.transport.base import Transport
from ecrm.transport.links import LinkTransport
from ecrm.transport.membership import Head
from ecrm.transport.membership_socket import HeadServer, Rendezvous
from support.paths import PROGRAMS

JOIN, CUTS, HOSTS = "ECRM_TEST_LINKS", "ECRM_TEST_CUTS", "ECRM_TEST_HOSTS"
ADDRESS = "127.0.0.1"
SECONDS = 120.0
KEEP_ALIVE = 2.0


class LinkRanks:
    """So many processes of a program on links; `codes` has the exit code of each rank.

    With `gathered` hosts the ranks are on so many hosts with an address of their own, in turn, and
    messages between hosts are gathered.
    """

    def __init__(
        self,
        ranks: int,
        program: Path,
        *words: object,
        cut_every: float = 0.0,
        hosts: list[str] | None = None,
        keep_alive: float = KEEP_ALIVE,
        gathered: int = 0,
    ) -> None:
        run, secret = secrets.token_bytes(16), secrets.token_bytes(32)
        self.lines: list[str] = []
        head = Head(hosts or ["here"] * ranks, keep_alive)
        self.head = HeadServer(head, run, secret, ADDRESS, self.lines.append)
        self.rendezvous = Rendezvous(run, secret, self.head.place, keep_alive)
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(PROGRAMS / "fork_ranks.py"),
                str(program),
                str(ranks),
                str(cut_every),
                self.rendezvous.text(),
                *map(str, words),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, HOSTS: str(gathered)},
        )
        self.codes: dict[int, int] = {}

    def wait(self) -> str:
        """Wait for the end of all ranks, telling the head of deaths; returns the output."""
        timer = threading.Timer(SECONDS, os.killpg, (self.process.pid, signal.SIGKILL))
        timer.start()
        said = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if (found := re.fullmatch(r"(\d+) (-?\d+)\n", line)) is None:
                said.append(line)
                continue
            rank, code = map(int, found.groups())
            self.codes[rank] = code
            if code != 0:
                self.head.died([rank])
        timer.cancel()
        self.process.wait()
        self.head.close()
        return "".join([*said, *self.lines, f"codes {self.codes}"])


def transport_here() -> Transport:
    """The transport of this process: links if `LinkRanks` started the process, else MPI."""
    if JOIN not in os.environ:
        from ecrm.transport.mpi import MpiTransport

        return MpiTransport()
    rank, ranks, text = os.environ[JOIN].split(" ", 2)
    if (hosts := int(os.environ[HOSTS])) > 0:
        LinkTransport.least_ranks = 1
        Rendezvous.own_address = lambda _: f"127.0.0.{2 + int(rank) % hosts}"  # type: ignore[method-assign]
    transport = LinkTransport(int(rank), int(ranks), Rendezvous.of_text(text))
    if pause := float(os.environ[CUTS]):
        threading.Thread(target=_cut, args=(transport, pause), daemon=True).start()
    return transport


def figures_of(transport: Transport) -> dict[str, object]:
    """Counts of the links, for the result of a rank; empty for another transport."""
    return transport.figures()._asdict() if isinstance(transport, LinkTransport) else {}


def _cut(transport: LinkTransport, pause: float) -> None:
    """Shut down a connection now and then, at an instant that nobody chooses."""
    draw = random.Random(transport.rank)
    while True:
        time.sleep(pause * (0.5 + draw.random()))
        others = [rank for rank in transport.live if rank != transport.rank]
        if others:
            transport.cut(draw.choice(others))

"""Pairs of hosts heard by the head machine but cut off from each other: one host is given up.

The agent of a rank tells its client the addresses acknowledging nothing sent by the rank. Clients
put pairs of hosts into the job's folder on the head machine. A host is given up on the word of a
client of the other host of a pair, if the client's own agent has been heard since. Thus a lost host
costs no other host.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ecrm.launch.hosts_file import Host
from ecrm.process.neighbours import JOB, PidNotes
from ecrm.process.preflight import JOB_FOLDER
from ecrm.transport.membership import GATHER, chosen


class CutDetector:
    """Knowledge and reports of one rank's client about pairs of hosts.

    Without a folder for the job no pairs are known.
    """

    def __init__(
        self,
        rank: int,
        placed: Sequence[Host],
        keep_alive: float,
        clients: PidNotes,
        say: Callable[[str], None],
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`placed` has the host of each rank, `clients` the noticeboard of the clients."""
        names = [host.name for host in dict.fromkeys(placed)]
        self._names, self._of = names, [names.index(host.name) for host in placed]
        self._me, self._gather = self._of[rank], GATHER * keep_alive
        self._clients, self._say, self._clock = clients, say, clock
        folder = Path(environ.get(JOB_FOLDER, "/nonexistent"))
        self._folder = folder / f"ecrm-cuts-{environ.get(JOB, '')}"

    def is_at(self, address: str) -> None:
        """Record `address` as the address of this client's host."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
        self._put(f"address {address}", str(self._me))

    def unheard(self, addresses: Collection[str]) -> None:
        """Record pairs with the hosts at addresses acknowledging nothing, except lost hosts."""
        living = self._living()
        for address in addresses:
            with contextlib.suppress(OSError, ValueError):
                other = int((self._folder / f"address {address}").read_text())
                if other in living and other != self._me:
                    self._put("pair {} {}".format(*sorted((other, self._me))), str(self._clock()))

    def given_up(self, heard: float) -> bool:
        """Whether this client's host is given up; `heard` is when its agent was last heard.

        Also gives up other hosts, if this client may decide.
        """
        pairs, gone = self._read()
        if pairs and self._clock() - min(pairs.values()) >= self._gather:
            lost = {host for pair in pairs for host in pair} - self._living()
            for host in lost:  # lost in a different way: all clients of the host are dead
                self._put(f"gone {host}", "")
            for host in chosen([pair for pair in pairs if not lost & set(pair)]):
                witnessed = [
                    pair
                    for pair, since in pairs.items()
                    if {host, self._me} == set(pair) and heard > since
                ]
                if witnessed and host != self._me and self._put(f"gone {host}", ""):
                    one, other = (self._names[number] for number in witnessed[0])
                    self._say(
                        f"ecrm: hosts {one} and {other} do not hear each other, "
                        f"though this machine hears both: host {self._names[host]} is given up"
                    )
        return self._me in gone

    def is_gone(self) -> bool:
        """Whether this client's host has been given up."""
        return self._me in self._read()[1]

    def _living(self) -> set[int]:
        """Hosts with a live client."""
        return {self._of[rank] for rank in self._clients.living()}

    def _read(self) -> tuple[dict[tuple[int, int], float], set[int]]:
        """({pair of hosts not given up: when the pair became known}, hosts given up)."""
        pairs: dict[tuple[int, int], float] = {}
        gone: set[int] = set()
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                kind, *words = name.split()
                if kind == "gone":
                    gone.add(int(words[0]))
                elif kind == "pair":
                    pairs[int(words[0]), int(words[1])] = float((self._folder / name).read_text())
        return {pair: since for pair, since in pairs.items() if not gone & set(pair)}, gone

    def _put(self, name: str, text: str) -> bool:
        """Put a file there, whole or not at all; return whether this call was the first."""
        draft = self._folder / f".draft {os.getpid()}"
        with contextlib.suppress(OSError):  # no such folder: no mpirun
            draft.write_text(text)
            try:
                os.link(draft, self._folder / name)
            finally:
                draft.unlink()
            return True
        return False

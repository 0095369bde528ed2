"""Hosts that do not hear each other: which of them the clients give up."""

from __future__ import annotations

from pathlib import Path

import pytest

from ecrm.launch.hosts_file import Host
from ecrm.launch.network_cuts import CutDetector
from ecrm.process.neighbours import JOB
from ecrm.process.preflight import JOB_FOLDER

KEEP_ALIVE = 2.0
PLACED = [Host(name, 2, name) for name in ("a", "b", "c", "a", "b", "c")]
ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}


class Clients:
    """The clients of six ranks on three hosts, whose agents were heard just now, and the time."""

    def __init__(self, folder: Path) -> None:
        self.now, self.alive, self.said = 100.0, set(range(len(PLACED))), []
        environ = {JOB_FOLDER: str(folder), JOB: "job"}
        self.cuts = [
            CutDetector(rank, PLACED, KEEP_ALIVE, self, self.said.append, environ, lambda: self.now)
            for rank in range(len(PLACED))
        ]
        for host, cuts in zip(PLACED, self.cuts):
            cuts.is_at(ADDRESSES[host.name])

    def living(self) -> set[int]:
        return self.alive

    def given_up(self, heard: float | None = None) -> set[int]:
        """The ranks whose hosts are, once all who live have looked."""
        for _ in range(2):
            gone = {
                rank
                for rank in sorted(self.alive)
                if self.cuts[rank].given_up(self.now if heard is None else heard)
            }
        return gone


@pytest.fixture
def clients(tmp_path):
    return Clients(tmp_path)


def test_of_two_hosts_the_last_is_given_up_and_that_is_said_once(clients):
    clients.cuts[3].unheard([ADDRESSES["b"], "10.9.9.9"])
    assert clients.given_up() == set(), "others may be in more pairs"
    clients.now += KEEP_ALIVE
    assert clients.given_up() == {1, 4}
    clients.cuts[3].unheard([ADDRESSES["b"]])
    clients.alive -= {1, 4}
    clients.now += KEEP_ALIVE
    assert clients.given_up() == set()
    (said,) = clients.said
    assert said == (
        "ecrm: hosts a and b do not hear each other, though this machine hears both: "
        "host b is given up"
    )


def test_a_host_in_more_pairs_is_given_up_and_only_that(clients):
    clients.cuts[0].unheard([ADDRESSES["b"]])
    clients.now += 0.1
    clients.cuts[2].unheard([ADDRESSES["a"]])
    clients.now += KEEP_ALIVE
    assert clients.given_up() == {0, 3}


def test_a_host_that_is_lost_costs_no_other(clients):
    """a and b do not hear each other since a is lost, which nobody knows yet.

    It would be for a's clients to give up b, but these have heard nothing since.
    """
    clients.cuts[1].unheard([ADDRESSES["a"]])
    before, clients.now = clients.now, clients.now + KEEP_ALIVE
    assert clients.given_up(heard=before) == set()
    clients.alive -= {0, 3}
    assert clients.given_up() == set() == set(clients.said)
    clients.cuts[2].unheard([ADDRESSES["a"]])
    clients.now += KEEP_ALIVE
    assert clients.given_up() == set() == set(clients.said)


def test_without_a_folder_of_the_job_nothing_is_given_up():
    cuts = CutDetector(0, PLACED, KEEP_ALIVE, Clients.__new__(Clients), print, {})
    cuts.is_at("10.0.0.1")
    assert not cuts.given_up(1.0) and not cuts.is_gone()

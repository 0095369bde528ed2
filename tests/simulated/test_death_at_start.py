"""A rank that dies while it takes the run folder, or looks into it: the next rank does."""

from __future__ import annotations

import pytest

from ecrm.errors import EcrmError, UsageError
from ecrm.run import collective_check
from ecrm.run.collective_check import on_one_rank, own_folder
from ecrm.testing.simulated_transport import PhaseFault, SimulatedCluster


class Lock:
    """A run's hold on a folder, as all ranks of a simulated cluster see it."""

    def __init__(self, owners: list[int]) -> None:
        self.owners = owners

    def take(self) -> None:
        """The check that follows takes it."""

    def join(self) -> None:
        """Nothing is there to wait for."""

    @property
    def is_mine(self) -> bool:
        return bool(self.owners)


def cluster_of_mpi(faults):
    """A cluster whose survivors see the end of a call alike, as MPI promises of an agreement."""
    cluster = SimulatedCluster(4, 1, faults)
    cluster._completes = 1.0
    return cluster


@pytest.mark.parametrize("dead", [(), (0,), (0, 1)])
def test_the_next_rank_takes_the_folder(dead, monkeypatch, tmp_path):
    owners: list[int] = []
    monkeypatch.setattr(collective_check, "RunLock", lambda folder, host: Lock(owners))
    cluster = cluster_of_mpi([PhaseFault(rank, 0, "take") for rank in dead])

    def program(transport):
        def check():
            cluster.enter_phase(transport.rank, 0, "take")
            owners.append(transport.rank)

        return own_folder(transport, tmp_path, "host", check)[1]

    outcome = cluster.run(program)
    assert owners == [len(dead)]
    assert outcome.results == {rank: [] for rank in range(len(dead), 4)}


@pytest.mark.parametrize("dead", [(), (0,), (0, 1)])
def test_the_next_rank_looks(dead):
    cluster = cluster_of_mpi([PhaseFault(rank, 0, "look") for rank in dead])

    def program(transport):
        def look():
            cluster.enter_phase(transport.rank, 0, "look")
            return transport.rank

        return on_one_rank(transport, look)

    outcome = cluster.run(program)
    assert outcome.results == {rank: len(dead) for rank in range(len(dead), 4)}


def test_an_error_of_the_rank_that_looks_is_every_ranks():
    def program(transport):
        def look():
            raise UsageError(f"rank {transport.rank} finds another run")

        with pytest.raises(EcrmError) as told:
            on_one_rank(transport, look)
        return str(told.value), told.value.speaker

    outcome = SimulatedCluster(3, 1).run(program)
    assert set(outcome.results.values()) == {("rank 0 finds another run", 0)}

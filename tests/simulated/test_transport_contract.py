"""The contract of a transport, simulated in one process."""

from __future__ import annotations

from random import Random

import pytest

from ecrm.testing.simulated_transport import LinkCluster, LinkFaults, RankKilled, SimulatedCluster
from support.programs import transport_contract
from support.seeds import some_and_more

RANKS = transport_contract.WORLD_SIZE
EXPECTED_SURVIVORS = list(transport_contract.SURVIVORS)


def die_in_simulation(seconds: float) -> None:
    raise RankKilled


def test_contract_holds_in_simulation() -> None:
    for seed in range(6):
        cluster = SimulatedCluster(RANKS, seed)
        outcome = cluster.run(
            lambda transport: transport_contract.contract(transport, die_in_simulation, 8 << 10)
        )
        assert sorted(outcome.results) == EXPECTED_SURVIVORS, f"seed {seed}"
        assert all(result["live"] == EXPECTED_SURVIVORS for result in outcome.results.values())
        assert {kill.rank for kill in outcome.killed} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("seeds", some_and_more(2, 12))
def test_contract_holds_on_simulated_links(seeds: range) -> None:
    """The real transport over real links; calm with seed 0, else with faults of the network."""
    resets = 0
    for seed in seeds:
        network = LinkFaults.drawn(Random(seed)) if seed else LinkFaults()
        cluster = LinkCluster(RANKS, seed, network=network)
        outcome = cluster.run(
            lambda transport: transport_contract.contract(transport, die_in_simulation, 8 << 10)
        )
        assert sorted(outcome.results) == EXPECTED_SURVIVORS, f"seed {seed}"
        assert all(result["live"] == EXPECTED_SURVIVORS for result in outcome.results.values())
        assert {kill.rank for kill in outcome.killed} == {1, 2, 3, 4, 5}
        resets += cluster.mix["resets of connections"]
    assert resets

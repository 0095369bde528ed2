"""The contract of a transport, simulated in one process."""

from __future__ import annotations

from ecrm.testing.simulated_transport import RankKilled, SimulatedCluster
from support.programs import transport_contract

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

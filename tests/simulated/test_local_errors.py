"""A rank's own error ends that rank, and is never taken for the death of a peer that dies too."""

from __future__ import annotations

import pytest

from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.protection.parity import ParityRows
from ecrm.storage.base import Store
from ecrm.testing.simulate.oracle import truth_of
from ecrm.testing.simulate.workload import Outcome, Workload, run_workload
from ecrm.testing.simulated_transport import ProgramFailed, RankKilled, SimulatedCluster
from ecrm.transport.base import Transport

FAILS, DIES = 0, 1
STEP = 5  # which is committed with either interval


def _out_of_memory_after_rows_are_stored(patch, fails):
    right = Store._materialise

    def materialise(self, rows):
        fresh, values = right(self, rows)
        if fresh.numel() and fails(self):
            raise MemoryError("injected after rows were stored")
        return fresh, values

    patch.setattr(Store, "_materialise", materialise)


def _out_of_memory_before_parity_is_logged(patch, fails):
    right = ParityRows.apply

    def apply(self, rows, coefficient, deltas):
        right(self, rows, coefficient, deltas)
        if self._log and fails(self):
            self._log.pop()
            raise MemoryError("injected after parity was changed")

    patch.setattr(ParityRows, "apply", apply)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize(
    "inject", [_out_of_memory_after_rows_are_stored, _out_of_memory_before_parity_is_logged]
)
def test_a_rank_out_of_memory_in_an_update_while_a_peer_dies_is_one_death_more(
    monkeypatch, inject, interval, seed
):
    workload = Workload(
        servers=5, trainers=2, spares=2, k=2, m=2, commit_interval=interval, steps=9
    )
    engines: dict[int, Engine] = {}
    failed = []

    def fails(part: object) -> bool:
        engine = engines.get(FAILS)
        if engine is None or failed or engine.step != STEP:
            return False
        mine = [hosted.store for hosted in engine.state.hosted.values()] + list(
            engine.state.protection.parity.values()
        )
        if not any(part is one for one in mine):
            return False
        failed.append(part)
        return True

    inject(monkeypatch, fails)
    reported: list[dict[str, str]] = []

    def dies(rank: int, step: int, phase: str) -> None:
        if rank == DIES and phase == "recover":
            raise RankKilled

    cluster = SimulatedCluster(workload.world_size, seed, on_phase=dies)

    def program(transport: Transport) -> Outcome:
        hooks = Hooks(phase=lambda step, name: cluster.enter_phase(transport.rank, step, name))
        return run_workload(
            workload,
            transport,
            hooks,
            after_start=lambda engine: engines.update({transport.rank: engine}),
            report=reported.append,
        )

    with pytest.raises(ProgramFailed) as caught:
        cluster.run(program)
    monkeypatch.undo()
    outcome = caught.value.outcome
    assert failed and [kill.rank for kill in outcome.killed] == [DIES]
    assert [type(error) for error in caught.value.errors.values()] == [MemoryError] and list(
        caught.value.errors
    ) == [FAILS]
    assert reported == [truth_of(workload).tables]
    assert len(outcome.results) == workload.world_size - 2
    assert not any(result.verified.mismatches for result in outcome.results.values())

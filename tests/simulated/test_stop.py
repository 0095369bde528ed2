"""All ranks stop at the same commit, whoever asks and whoever dies meanwhile (simulated)."""

from __future__ import annotations

import random

import pytest

from ecrm.engine.computed import Computed
from ecrm.engine.hooks import Hooks, StepAborted, StopRequested
from ecrm.testing.simulate.workload import Workload, make_engine, train_step
from ecrm.testing.simulated_transport import RandomFaults, SimulatedCluster


def stops(seed: int, interval: int, deaths: int) -> tuple[set[tuple[int, int]], int, int]:
    """Returns ({(step, committed) of each rank that stopped}, first step asked, deaths).

    The first step asked is the one from which one rank asks all to stop.
    """
    draw = random.Random(seed)
    workload = Workload(
        seed=seed, steps=40, commit_interval=interval, k=2, m=2, servers=4, spares=2
    )
    asker, at = draw.randrange(workload.world_size), draw.randrange(0, 12)
    faults = RandomFaults(
        most=deaths,
        per_call=0.01,
        per_recovery_call=0.05,
        may_kill=lambda rank, killed: rank != asker,
    )
    cluster = SimulatedCluster(workload.world_size, seed, faults if deaths else ())

    def program(transport):
        engine = None
        hooks = Hooks(
            asks=lambda: engine is not None and transport.rank == asker and engine.step >= at
        )
        engine, computed = make_engine(workload, transport, hooks, lambda: 0.0), Computed()
        while True:
            try:
                try:
                    engine.check_stop()
                    while engine.step < workload.steps:
                        train_step(workload, engine, computed)
                        if engine.recovery.stopping:
                            raise StopRequested
                    return None
                except StopRequested:
                    engine.commit()
                    with engine.recovery.recovering():
                        engine.state.transport.agree(True)
                    return engine.step, engine.committed
            except StepAborted:
                continue

    outcome = cluster.run(program)
    return set(outcome.results.values()), at, len(outcome.killed)


@pytest.mark.parametrize("interval", [1, 8])
@pytest.mark.parametrize("deaths", [0, 2])
def test_all_stop_at_the_same_commit(interval, deaths):
    died = 0
    for seed in range(10, 18):
        places, at, killed = stops(seed, interval, deaths)
        died += killed
        assert len(places) == 1, (seed, places)
        (step, committed) = places.pop()
        assert step == committed, seed
        assert step <= at + 1, "not a step later than asked, whatever the commit interval"
        assert deaths or step >= at
    assert (died > 0) == (deaths > 0)

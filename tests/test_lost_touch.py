"""A call between ranks fails though nobody has died: recovered where updates can be taken back, else refused; never a wrong model."""

from __future__ import annotations

import pytest

from ecrm.engine.hooks import Hooks
from ecrm.errors import Unrecoverable
from ecrm.simulate.oracle import truth_of
from ecrm.simulate.workload import Workload, run_workload
from ecrm.transport.base import PeerFailure, Transport
from ecrm.transport.simulated import SimulatedCluster

FAILS_AT = 5


def _run(workload: Workload, phase: str) -> tuple[list[object], list[dict[str, str]]]:
    """What every rank returned, and the digests reported; rank 1 sees a failed call once, as a phase of step 5 begins."""
    reported: list[dict[str, str]] = []
    failed = []

    def program(transport: Transport) -> object:
        def fail_once(step: int, name: str) -> None:
            if (transport.rank, step, name) == (1, FAILS_AT, phase) and not failed:
                failed.append(name)
                raise PeerFailure("injected")

        try:
            return run_workload(workload, transport, Hooks(phase=fail_once), report=reported.append)
        except Unrecoverable as error:
            return error

    outcome = SimulatedCluster(workload.world_size, 1).run(program)
    assert failed == [phase] and not outcome.killed
    return list(outcome.results.values()), reported


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("phase", ["lookup", "update", "dense", "commit"])
def test_without_protection_the_run_goes_on_only_where_nothing_was_updated(phase, interval):
    workload = Workload(protection="none", commit_interval=interval)
    results, reported = _run(workload, phase)
    if phase in ("lookup", "update") and interval == 1:
        assert reported == [truth_of(workload).tables]
        return
    assert reported == []
    said = {str(result) for result in results if isinstance(result, Unrecoverable)}
    assert len(results) == workload.world_size and said == {
        "ranks lost touch with each other, none of them died: protection none cannot take back "
        f"the updates since step {FAILS_AT if interval == 1 else 3}"
    }


@pytest.mark.parametrize("phase", ["lookup", "update", "parity", "dense", "commit"])
def test_with_protection_the_same_is_recovered(phase):
    workload = Workload(commit_interval=1)
    assert _run(workload, phase)[1] == [truth_of(workload).tables]

"""A call between ranks fails though nobody has died: recovered from, or refused.

It is refused where updates cannot be taken back. The model is never wrong.
"""

from __future__ import annotations

import json

import pytest
import torch

from ecrm.base.errors import LostTouch, StrayRow, Unrecoverable, UsageError
from ecrm.engine.failures import MOST_FUTILE, FailureLog
from ecrm.engine.hooks import Hooks
from ecrm.run.gather import gather_results
from ecrm.run.run_rank import say_why
from ecrm.testing.simulate import workload as workload_module
from ecrm.testing.simulate.oracle import truth_of
from ecrm.testing.simulate.workload import Workload, run_workload
from ecrm.testing.simulated_transport import SimulatedCluster
from ecrm.transport.base import PeerFailure, Transport
from support.telling import noted_in

FAILS_AT = 5


def _run(workload: Workload, phase: str) -> tuple[list[object], list[dict[str, str]]]:
    """Returns every rank's result and the digests reported.

    On rank 1 one call fails, as a phase of step 5 begins.
    """
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


def _run_failing(
    workload: Workload, fails
) -> tuple[dict[int, object], dict[int, list[dict]], list[dict[str, str]]]:
    """Returns every rank's result, its events, and the digests reported.

    A call fails wherever `fails(rank, step, phase)`.
    """
    events: dict[int, list[dict]] = {rank: [] for rank in range(workload.world_size)}
    reported: list[dict[str, str]] = []

    def program(transport: Transport) -> object:
        def phase(step: int, name: str) -> None:
            if fails(transport.rank, step, name):
                raise PeerFailure("injected")

        try:
            return run_workload(
                workload,
                transport,
                Hooks(phase=phase, event=noted_in(events[transport.rank])),
                report=reported.append,
            )
        except (Unrecoverable, UsageError) as error:
            return error

    outcome = SimulatedCluster(workload.world_size, 1, most_calls=20_000).run(program)
    assert not outcome.killed
    return outcome.results, events, reported


def _interruptions(events: dict[int, list[dict]]) -> dict[int, list[tuple[int, int, str]]]:
    kept = ("number", "step", "phase")
    return {
        rank: [
            tuple(fields[name] for name in kept)
            for fields in of
            if fields["event"] == "interrupted"
        ]
        for rank, of in events.items()
    }


@pytest.mark.parametrize("phase", ["lookup", "update", "parity", "dense", "commit"])
@pytest.mark.parametrize("interval", [1, 4])
def test_a_call_that_keeps_failing_ends_the_run_on_all_ranks_with_its_reason(phase, interval):
    workload = Workload(commit_interval=interval, steps=9)
    step = 7 if interval == 4 and phase in ("parity", "commit") else FAILS_AT
    results, events, reported = _run_failing(
        workload, lambda rank, at, name: (rank, at, name) == (1, step, phase)
    )
    assert reported == [] and len(results) == workload.world_size
    assert {type(result) for result in results.values()} == {LostTouch}
    assert {str(result) for result in results.values()} == {
        f"calls between ranks failed {MOST_FUTILE + 1} times in a row, no rank died, and no "
        f"step was finished in between; "
        "the last time: rank 1: injected"
    }
    told = _interruptions(events)
    assert told[1] == [(number, step, phase) for number in (1, 2, 3)]
    # who is late for one recovery comes through with the next
    numbers = [[number for number, *_ in of] for of in told.values()]
    assert all(of and of == sorted(set(of) & {1, 2, 3}) for of in numbers)
    assert {fields["why"] for fields in events[0] if fields["event"] == "interrupted"} == {
        "rank 1: injected"
    }


def test_where_not_even_ranks_in_recovery_hear_one_another_all_end_too():
    results, events, reported = _run_failing(
        Workload(), lambda rank, at, name: rank == 1 and (at, name) >= (FAILS_AT, "lookup")
    )
    assert reported == [] and {type(result) for result in results.values()} == {LostTouch}
    assert "injected" in str(results[1])
    assert not any(_interruptions(events).values())


@pytest.mark.parametrize("interval", [1, 3])
def test_calls_that_fail_now_and_then_are_counted_and_cost_nothing(interval):
    workload = Workload(commit_interval=interval, steps=9)
    failed = set()

    def fails(rank: int, step: int, phase: str) -> bool:
        due = (rank, phase) == (step % 3, "update") and step not in failed
        failed.update({step} if due else ())
        return due

    _results, events, reported = _run_failing(workload, fails)
    assert reported == [truth_of(workload).tables] and len(failed) == workload.steps > MOST_FUTILE
    assert all(of[-1][0] == workload.steps for of in _interruptions(events).values())


@pytest.mark.parametrize("bad", [-3, 47, 1 << 40])
@pytest.mark.parametrize("look_ahead", [True, False])
def test_a_row_that_does_not_exist_ends_the_run_on_all_ranks_before_anything_is_sent(
    monkeypatch, tmp_path, bad, look_ahead
):
    """Row space 0 of this job has tables a, of 40 rows, and b, of 7."""
    workload, right = Workload(look_ahead=look_ahead), workload_module.rows_of

    def rows_of(workload, step, slot):
        rows = right(workload, step, slot)
        if (step, slot) == (FAILS_AT, 1):
            rows[0] = torch.cat([rows[0], torch.tensor([bad])]).sort().values
        return rows

    monkeypatch.setattr(workload_module, "rows_of", rows_of)
    results, events, reported = _run_failing(workload, lambda *_: False)
    named = (
        f"id {bad} is not in table a, whose ids are 0 to 39"
        if bad < 0
        else f"id {bad - 40} is not in table b, whose ids are 0 to 6"
    )
    assert reported == [] and {type(result) for result in results.values()} == {StrayRow}
    assert {str(result) for result in results.values()} == {
        f"step {FAILS_AT}, slot 1: {named} (row {bad} of row space 0, which has rows 0 to 46)"
    }
    assert len({result.speaker for result in results.values()}) == 1
    assert not any(fields["event"] == "failure" for of in events.values() for fields in of)
    say_why(results[0], tmp_path)
    said = json.loads((tmp_path / "failure.json").read_text())
    assert (said["message"], said["exit_code"]) == (str(results[0]), 2)


def test_what_is_refused_before_a_folder_is_the_runs_leaves_nothing_in_it(tmp_path):
    say_why(UsageError("in use by a run that is alive"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_call_that_keeps_failing_before_there_is_an_engine_ends_the_start():
    def program(transport: Transport) -> str:
        def fails(tensors: object) -> None:
            raise PeerFailure("injected")

        if transport.rank == 1:
            transport.share = fails
        with pytest.raises(LostTouch) as told:
            gather_results(transport, lambda: "hello")
        return str(told.value)

    results = SimulatedCluster(4, 1, most_calls=1_000).run(program).results
    assert len(results) == 4 and results[1].endswith("the last time: injected")
    assert {text.partition("; the last")[0] for text in results.values()} == {
        f"calls between ranks failed {MOST_FUTILE + 1} times in a row, no rank died, and no "
        f"step was finished in between"
    }


def test_a_commit_counts_as_progress_only_for_a_step_never_committed_before():
    log = FailureLog()
    log.committed(5)
    log.futile = 3
    log.committed(4)
    log.committed(5)
    assert log.futile == 3
    log.committed(6)
    assert log.futile == 0

"""The simulated cluster: same seed, same run; every kind of death; errors that name the cause."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
import torch

from ecrm.testing.simulated_transport import (
    AFTER,
    BEFORE,
    DURING,
    Fault,
    Kill,
    PhaseFault,
    ProgramFailed,
    RandomFaults,
    RankKilled,
    SimulatedCluster,
    SimulationDeadlock,
    SimulationMismatch,
    SimulationTooLong,
)
from ecrm.testing.simulated_transport.communicator import CallMismatch, Communicator
from ecrm.testing.simulated_transport.transport import SimulatedTransport
from ecrm.transport.base import PeerFailure, Transport


def number(value: int) -> list[torch.Tensor]:
    return [torch.tensor([value])]


def recover(transport: Transport, step: int) -> int:
    """Shrink until all agree; the largest step of all."""
    while True:
        transport.shrink()
        try:
            steps = [int(tensors[0]) for tensors in transport.share(number(step)).values()]
            assert max(steps) - min(steps) <= 1
            if transport.agree(True):
                return max(steps)
        except PeerFailure:
            pass


def steps(
    count: int, phase: Callable[[int, int], None] = lambda rank, step: None
) -> Callable[[Transport], object]:
    """A program of `count` bulk-synchronous steps that checks all it receives.

    Returns (step, live).
    """

    def program(transport: Transport) -> object:
        step = 0
        while step < count:
            phase(transport.rank, step)
            try:
                for turn in range(3):
                    received = transport.exchange(
                        {to: number(1000 * step + turn) for to in transport.live}
                    )
                    assert list(received) == list(transport.live)
                    assert {int(tensors[0]) for tensors in received.values()} == {
                        1000 * step + turn
                    }
                step += transport.agree(True)
            except PeerFailure:
                step = recover(transport, step)
        return step, transport.live

    return program


# The same again, and not the same.


def random_run(seed: int | str) -> list:
    random = Random(seed)
    cluster = SimulatedCluster(random.randrange(2, 9), seed, RandomFaults.drawn(random, most=3))
    return cluster.run(steps(10)).trace


def test_a_seed_replays_its_schedule_exactly() -> None:
    assert all(random_run(seed) == random_run(seed) for seed in range(30))
    assert random_run("3f2a9c1") == random_run("3f2a9c1")


def test_seeds_differ() -> None:
    schedules = {tuple(SimulatedCluster(4, seed).run(steps(10)).trace) for seed in range(50)}
    assert len(schedules) == 50


def test_a_cluster_runs_once() -> None:
    cluster = SimulatedCluster(2, 0)
    cluster.run(steps(1))
    with pytest.raises(RuntimeError, match="once"):
        cluster.run(steps(1))


def test_only_one_rank_runs_at_a_time() -> None:
    inside = []

    def program(transport: Transport) -> None:
        for _ in range(50):
            inside.append(transport.rank)
            sum(range(2000))
            assert inside == [transport.rank]
            inside.clear()
            transport.agree(True)

    SimulatedCluster(6, 1).run(program)


# Deaths.


def test_without_faults_everybody_finishes() -> None:
    outcome = SimulatedCluster(5, 0).run(steps(10))
    assert outcome.results == dict.fromkeys(range(5), (10, (0, 1, 2, 3, 4)))
    assert outcome.killed == [] and outcome.calls == 5 * 10 * 4


def test_a_rank_may_die_at_every_call_in_every_way() -> None:
    """Every survivor finishes, on the same live ranks; the death is where it was ordered."""
    for when in (BEFORE, DURING, AFTER):
        for call_index in range(12):
            method = "agree" if call_index % 4 == 3 else "exchange"
            for seed in range(4):
                outcome = SimulatedCluster(4, seed, [Fault(2, call_index, when)]).run(steps(3))
                assert outcome.killed == [Kill(2, call_index, method, when)]
                assert outcome.unfired == []
                # who saw the last call succeed has ended; others may have gone on without it
                if call_index == 11:
                    assert {step for step, live in outcome.results.values()} == {3}
                    assert set(outcome.results) == {0, 1, 3}
                else:
                    assert outcome.results == dict.fromkeys((0, 1, 3), (3, (0, 1, 3)))


def test_deaths_inside_recovery_and_inside_that() -> None:
    faults = [
        Fault(1, 5, DURING),  # an exchange of the second step
        Fault(2, 6, DURING),  # its first shrink, if it saw the failure in call 5
        Fault(3, 7, BEFORE),
        Fault(4, 8, AFTER),
    ]
    seen = Counter()
    for seed in range(200):
        outcome = SimulatedCluster(7, seed, faults).run(steps(6))
        assert outcome.results == dict.fromkeys((0, 5, 6), (6, (0, 5, 6)))
        seen.update((kill.rank, kill.method) for kill in outcome.killed)
    for rank in (2, 3, 4):
        assert seen[rank, "shrink"] > 10, seen


def test_one_who_dies_in_a_shrink_may_stay_among_the_live_and_is_found_later() -> None:
    """Rank 1 dies, then rank 2 inside the shrink.

    The survivors' first `live` may still have rank 2.
    """
    lives = Counter()

    def program(transport: Transport) -> None:
        try:
            while True:
                transport.agree(True)
        except PeerFailure:
            transport.shrink()
            first = transport.live
            recover(transport, 0)
            lives[first, transport.live] += 1

    for seed in range(60):
        SimulatedCluster(4, seed, [Fault(1, 0, BEFORE), Fault(2, 1, DURING)]).run(program)
    assert set(lives) == {((0, 3), (0, 3)), ((0, 2, 3), (0, 3))}
    assert min(lives.values()) > 20


def test_several_at_once_from_chance_and_never_more_than_asked() -> None:
    deaths = Counter()
    for seed in range(150):
        cluster = SimulatedCluster(8, seed, RandomFaults(most=3, per_call=0.01, together=0.7))
        outcome = cluster.run(steps(5))
        deaths[len(outcome.killed)] += 1
        survivors = set(range(8)) - {kill.rank for kill in outcome.killed}
        assert set(outcome.results) == survivors
        assert all(step == 5 for step, live in outcome.results.values())
    assert set(deaths) <= {0, 1, 2, 3} and deaths[3] > 50


def test_who_may_be_killed_is_asked() -> None:
    for seed in range(40):
        faults = RandomFaults(
            most=8, per_call=0.05, together=0.9, may_kill=lambda rank, killed: rank % 2 == 1
        )
        outcome = SimulatedCluster(6, seed, faults).run(steps(8))
        assert {kill.rank for kill in outcome.killed} <= {1, 3, 5}
        assert {0, 2, 4} <= set(outcome.results)


def test_a_rank_may_die_between_calls_by_order_or_by_hook() -> None:
    def hook(rank: int, step: int, phase: str) -> None:
        if (rank, step, phase) == (0, 3, "lookup"):
            raise RankKilled

    for seed in range(20):
        cluster = SimulatedCluster(
            5, seed, [PhaseFault(3, 1, "lookup"), PhaseFault(4, 9, "never")], on_phase=hook
        )
        outcome = cluster.run(
            steps(6, lambda rank, step: cluster.enter_phase(rank, step, "lookup"))
        )
        assert outcome.results == dict.fromkeys((1, 2, 4), (6, (1, 2, 4)))
        assert [(kill.rank, kill.when) for kill in outcome.killed] == [
            (3, "lookup of step 1"),
            (0, "lookup of step 3"),
        ]
        assert outcome.unfired == [PhaseFault(4, 9, "never")]


def test_everybody_may_die() -> None:
    outcome = SimulatedCluster(3, 0, [Fault(rank, 2, AFTER) for rank in range(3)]).run(steps(5))
    assert outcome.results == {} and len(outcome.killed) == 3


def test_a_dying_program_cannot_go_on() -> None:
    """A `finally` that calls the transport again is no way back."""
    calls_after_death = []

    def program(transport: Transport) -> None:
        try:
            transport.agree(True)
        except PeerFailure:
            return
        finally:
            if transport.rank == 0:
                transport.share([])
                calls_after_death.append(0)

    SimulatedCluster(2, 0, [Fault(0, 0, BEFORE)]).run(program)
    assert calls_after_death == []


def test_a_fault_needs_a_moment() -> None:
    with pytest.raises(ValueError, match="'later'"):
        Fault(0, 0, "later")


def test_survivors_of_one_call_are_told_different_things() -> None:
    """A rank dies in a call.

    Some ranks complete the call, some fail at once, some fail only after another has begun to
    shrink.
    """
    kinds = Counter()

    def program(transport: Transport) -> str:
        try:
            transport.exchange({to: number(1) for to in transport.live})
            told = "completes"
        except PeerFailure as failure:
            told = "fails" if "died" in str(failure) else "refused"
        transport.shrink()
        return told

    for seed in range(200):
        outcome = SimulatedCluster(4, seed, [Fault(0, 0, DURING)]).run(program)
        kinds.update({"".join(sorted(result[0] for result in outcome.results.values()))})
        first_shrink = next(
            at for at, event in enumerate(outcome.trace) if event.method == "shrink"
        )
        kinds["failed after the shrink"] += any(
            event.what == "fails" for event in outcome.trace[first_shrink:]
        )
    assert {"ccc", "ccf", "cff", "fff"} <= set(kinds)
    assert kinds["failed after the shrink"] > 10


# Agreement.


def test_agree_is_uniform_over_two_thousand_schedules() -> None:
    """True nowhere beside False; True only after all other live ranks have called with True."""
    seen = Counter()
    for seed in range(2000):
        random = Random(seed)
        ranks = random.randrange(2, 6)
        faults = RandomFaults(most=ranks - 1, per_call=0.08, per_recovery_call=0.1, together=0.3)
        check_agreements(ranks, seed, faults, seen)
    assert seen["True beside PeerFailure"] > 100
    assert seen["False beside PeerFailure"] > 100
    assert seen["True after a death"] > 100
    assert seen["PeerFailure everywhere"] > 100
    assert seen["killed"] > 1000


def test_the_check_of_agreement_notices_a_broken_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedTransport, "agree", lambda self, flag: [flag, self.share([])][0])
    with pytest.raises((AssertionError, ProgramFailed)):
        for seed in range(20):
            check_agreements(4, seed, RandomFaults(most=0), Counter())


def check_agreements(ranks: int, seed: int, faults: RandomFaults, seen: Counter) -> None:
    flags: dict[tuple, dict[int, bool]] = {}  # of each agree call: what each rank called it with
    results: dict[tuple, dict[int, object]] = {}

    def program(transport: Transport) -> None:
        random = Random(1000 * seed + transport.rank)
        shrinks = done = 0
        while done < 4:
            key = (shrinks, done)
            flag = flags.setdefault(key, {})[transport.rank] = random.random() < 0.8
            try:
                answer = results.setdefault(key, {})[transport.rank] = transport.agree(flag)
                if answer:
                    absent = {rank for rank in transport.live if flags[key].get(rank) is not True}
                    assert absent <= set(cluster.killed_ranks), (
                        f"True although {absent} have not called with True"
                    )
                done += 1
            except PeerFailure:
                results.setdefault(key, {})[transport.rank] = PeerFailure
                transport.shrink()
                shrinks += 1
                done = 0  # all survivors start again together

    cluster = SimulatedCluster(ranks, seed, faults)
    outcome = cluster.run(program)
    seen["killed"] += len(outcome.killed)
    for key, by_rank in results.items():
        values = set(by_rank.values())
        assert not {True, False} <= values, f"seed {seed}: {key} {by_rank}"
        if values == {PeerFailure}:
            seen["PeerFailure everywhere"] += 1
        elif PeerFailure in values:
            seen[f"{True in values} beside PeerFailure"] += 1
        if True in values and len(by_rank) < len(flags[key]):
            seen["True after a death"] += 1


# Memory.


def test_received_tensors_are_nobody_elses_memory() -> None:
    def program(transport: Transport) -> list[int]:
        mine = torch.arange(10)
        collected = [*transport.exchange({to: [mine, mine] for to in transport.live}).values()]
        collected += transport.share([mine, mine]).values()
        tensors = [tensor for tensors in collected for tensor in tensors]
        kept.extend([mine, *tensors])
        return [tensor.data_ptr() for tensor in [mine, *tensors]]

    kept: list[torch.Tensor] = []
    results = SimulatedCluster(4, 0).run(program).results
    pointers = [pointer for by_rank in results.values() for pointer in by_rank]
    assert len(pointers) == 4 * (1 + 2 * 8) and len(set(pointers)) == len(pointers)


# Errors that end the run.


def test_waiting_for_a_rank_that_has_ended_is_a_deadlock_that_names_everybody() -> None:
    def program(transport: Transport) -> None:
        transport.agree(True)
        if transport.rank == 1:
            return
        if transport.rank == 0:
            transport.share([])
        transport.share([])

    with pytest.raises(SimulationDeadlock) as caught:
        SimulatedCluster(3, 0).run(program)
    message = str(caught.value)
    assert "rank 0 waits in share (its call 1) with (0, 1, 2), of whom [1] have ended" in message
    assert "rank 2 waits in share (its call 1)" in message
    assert "rank 1 waits" not in message
    assert caught.value.trace


def test_an_ended_rank_is_one_more_death_where_a_rank_has_died() -> None:
    """Rank 0 saw the last agree succeed and is gone.

    The others saw the death, and must not wait for rank 0 for ever.
    """
    endings = Counter()
    for seed in range(100):
        outcome = SimulatedCluster(4, seed, [Fault(3, 7, DURING)]).run(steps(2))
        endings[tuple(sorted({live for _, live in outcome.results.values()}))] += 1
        assert {step for step, _ in outcome.results.values()} == {2}
    assert len(endings) > 2


def test_different_calls_at_one_place_name_both() -> None:
    def program(transport: Transport) -> None:
        transport.agree(True)
        if transport.rank == 1:
            transport.agree(True)
        else:
            transport.share([])

    with pytest.raises(
        SimulationMismatch, match=r"call 1 .*rank . (share|agree), rank . (share|agree)"
    ) as caught:
        SimulatedCluster(2, 0).run(program)
    assert "agree" in str(caught.value) and "share" in str(caught.value)


def test_a_mismatch_cannot_be_swallowed() -> None:
    def program(transport: Transport) -> None:
        with contextlib.suppress(Exception):
            transport.agree(True) if transport.rank == 1 else transport.share([])

    with pytest.raises(SimulationMismatch):
        SimulatedCluster(3, 0).run(program)


def test_a_run_that_does_not_end_is_stopped() -> None:
    def program(transport: Transport) -> None:
        while True:
            transport.agree(True)

    with pytest.raises(SimulationTooLong, match="more than 500 calls"):
        SimulatedCluster(3, 0, most_calls=500).run(program)


def test_errors_of_programs_fail_the_run_with_rank_and_traceback() -> None:
    def program(transport: Transport) -> int:
        if transport.rank == 1:
            raise KeyError("broken on purpose")
        try:
            transport.agree(True)
        except PeerFailure:
            transport.shrink()
        return len(transport.live)

    with pytest.raises(ProgramFailed, match="broken on purpose") as caught:
        SimulatedCluster(3, 0).run(program)
    assert list(caught.value.errors) == [1]
    assert "in program" in str(caught.value) and "rank 1" in str(caught.value)
    assert caught.value.outcome.results == {0: 2, 2: 2}


def test_refusals_of_all_ranks_can_be_told_from_results() -> None:
    def program(transport: Transport) -> None:
        transport.agree(True)
        raise ArithmeticError(f"refused by {transport.rank}")

    with pytest.raises(ProgramFailed) as caught:
        SimulatedCluster(3, 0).run(program)
    assert {rank: str(error) for rank, error in caught.value.errors.items()} == {
        rank: f"refused by {rank}" for rank in range(3)
    }


def test_nothing_can_be_called_after_close() -> None:
    def program(transport: Transport) -> None:
        transport.close()
        transport.close()
        transport.agree(True)

    with pytest.raises(ProgramFailed, match="rank . has closed"):
        SimulatedCluster(2, 0).run(program)


def test_threads_of_torch_are_given_back() -> None:
    before = torch.get_num_threads()
    SimulatedCluster(2, 0).run(lambda transport: torch.get_num_threads())
    assert torch.get_num_threads() == before


# The rules alone.


def test_a_call_is_complete_where_everything_has_come() -> None:
    communicator = Communicator((0, 1, 2))
    call = communicator.enter(0, "share", "a")
    assert communicator.enter(1, "share", "b") is call
    assert not communicator.has_all(0, call) and not communicator.troubled
    communicator.enter(2, "share", "c")
    assert communicator.is_full(call) and communicator.has_all(1, call)
    call.reached[2] = {0}
    communicator.dead.add(2)
    assert (
        communicator.has_all(0, call)
        and not communicator.has_all(1, call)
        and communicator.troubled
    )
    with pytest.raises(CallMismatch, match="rank 0 share, rank 1 agree"):
        communicator.enter(0, "share", "d")
        communicator.enter(1, "agree", True)


def test_a_shrink_waits_for_the_living_only() -> None:
    communicator = Communicator((0, 1, 2, 3))
    communicator.shrinking.add(0)
    assert communicator.revoked and not communicator.all_shrinking()
    communicator.dead.add(1)
    communicator.left.add(2)
    assert not communicator.all_shrinking()
    communicator.shrinking.add(3)
    communicator.dead.add(3)
    assert communicator.all_shrinking()
    assert communicator.after_shrink([]).members == (0,)
    unnoticed = communicator.after_shrink([3])
    assert unnoticed.members == (0, 3) and unnoticed.dead == {3}


def test_the_former_name_of_the_package_is_told_and_works():
    with pytest.warns(DeprecationWarning, match="is ecrm.testing.simulated_transport now"):
        from ecrm.transport.simulated import PhaseFault as Former
    assert Former is PhaseFault
    with pytest.raises(ImportError):
        from ecrm.transport.simulated import Nothing  # noqa: F401

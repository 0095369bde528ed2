"""Fault schedules on the real engine over the simulated cluster, and canaries to be caught."""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
from collections import Counter
from random import Random
from types import SimpleNamespace

import pytest

import ecrm.testing.simulate.simulation as run_module
from ecrm.base.console import Progress
from ecrm.engine.hooks import Hooks
from ecrm.engine.step_log import StepLog
from ecrm.placement.view import View
from ecrm.protection.none import NoProtection
from ecrm.testing.simulate import seed_range
from ecrm.testing.simulate.checkers import Checkers
from ecrm.testing.simulate.oracle import Truth, truth_of
from ecrm.testing.simulate.promise import Circle, crowded, widest_k
from ecrm.testing.simulate.schedule import draw, parse_seed
from ecrm.testing.simulate.seed_range import SimulationFailed, run_range
from ecrm.testing.simulate.simulation import Failed, run_schedule
from ecrm.testing.simulate.workload import TinyDense, Workload, run_workload
from ecrm.testing.simulated_transport import PhaseFault, SimulatedCluster
from ecrm.testing.simulated_transport.baton import Baton
from support.canaries import CANARIES, Canary
from support.paths import ROOT
from support.seeds import some_and_more


@pytest.mark.parametrize("seeds", some_and_more(50, 350))
def test_survivable_schedules_finish_with_the_oracles_bits(seeds):
    totals = run_range(seeds, "survivable", jobs=1)
    print(totals)
    assert totals.refused == 0
    hundreds = len(seeds) / 100
    assert (
        totals.deaths > 280 * hundreds
        and totals.recoveries > 170 * hundreds
        and totals.reshapes > 11 * hundreds
        and totals.commits > 740 * hundreds
    )
    least = {  # of a hundred schedules
        "deaths inside recovery": 80,
        "deaths at the instant of another": 25,
        "deaths with the rest of a host": 1,
        "calls that failed though nobody died": 40,
        "schedules with erasure": 68,
        "schedules with chain": 3,
        "schedules with replicate": 8,
        "schedules with wide stripes": 2,
        "schedules with whole tables": 28,
        "schedules on an imitated GPU": 1,
    }
    rare = {kind for kind, count in least.items() if totals.mix[kind] < count * hundreds}
    assert rare == set(), totals
    assert totals.mix["recoveries with too many placements to compare"] < 10 * hundreds, totals


@pytest.mark.parametrize("seeds", some_and_more(30, 200))
def test_one_fault_too_many_is_refused_or_survived_but_never_wrong(seeds):
    totals = run_range(seeds, "fatal", jobs=1)
    print(totals)
    hundreds = len(seeds) / 100
    assert totals.refused > 40 * hundreds and totals.deaths > 200 * hundreds
    assert (
        totals.mix["deaths inside recovery"] > 55 * hundreds
        and totals.mix["deaths at the instant of another"] > 35 * hundreds
    ), totals


def test_ranks_lag_far_behind_in_some_schedules():
    """In one half of all seeds, ranks are drawn with an order of preference.

    Without that order nobody would wait for long.
    """

    def longest_wait(number):
        random, turn, waits = Random(number), [0], []
        baton = Baton(8, random, lambda: None)

        def body(rank):
            since = turn[0]
            for _ in range(60):
                turn[0] += 1
                waits.append(turn[0] - since)
                since = turn[0]
                baton.make_ready(rank)
                baton.wait(rank)

        baton.run(body)
        return max(waits)

    found = [longest_wait(number) for number in range(40)]
    assert sum(wait > 150 for wait in found) > 10 and sum(wait < 100 for wait in found) > 10, found


def test_a_seed_is_a_schedule():
    assert draw(17, "survivable") == draw(17, "survivable")
    assert draw(17, "survivable") != draw(18, "survivable")
    first, second = run_schedule(draw(17, "survivable")), run_schedule(draw(17, "survivable"))
    assert first == second
    assert parse_seed("17") == 17
    assert parse_seed("7c2d1f0") == parse_seed("7c2d1f0") != parse_seed("7c2d1f1")


def caught_at(canary: Canary, seeds: int) -> int | None:
    """The seed at which a checker catches a canary, or None; a mere crash is no catch."""
    for seed in range(seeds):
        try:
            run_schedule(draw(seed, canary.suite), canary.damage)
        except Failed as error:
            if error.caught:
                return seed
    return None


def listed_canaries() -> dict[str, tuple[str, int, int]]:
    """The canaries of docs/benchmarks/results.md.

    {name: (suite, seed at which it is caught, number of seeds within which it must be caught)}.
    """
    text = (ROOT / "docs" / "benchmarks" / "results.md").read_text()
    listed = re.findall(
        r"^\| ([^|]+) \| (survivable|fatal) \| (\d+) \| (\d+) \|$", text, re.MULTILINE
    )
    return {name: (suite, int(caught), int(within)) for name, suite, caught, within in listed}


SLOW = 30
"""Canaries with more seeds than this run in `make drill`."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.drill] if canary.seeds > SLOW else [])
        for name, canary in CANARIES.items()
    ],
)
def test_a_broken_engine_is_caught(name, monkeypatch):
    canary = CANARIES[name]
    if canary.patch is not None:
        canary.patch(monkeypatch)
    seed = caught_at(canary, canary.seeds)
    assert seed is not None
    assert listed_canaries()[name] == (canary.suite, seed, canary.seeds), (
        f"docs/benchmarks/results.md: {name} is caught at seed {seed}"
    )


def test_the_canaries_are_all_listed():
    assert set(listed_canaries()) == set(CANARIES)


def test_a_crash_is_no_catch():
    def crash(engine):
        engine.state.protection.undo = None

    with pytest.raises(Failed) as caught:
        for seed in range(30):
            run_schedule(draw(seed, "survivable"), crash)
    assert not caught.value.caught


def test_whatever_goes_wrong_names_its_seed(monkeypatch):
    right = run_module.truth_of

    def truth_of(workload, job):
        if workload == draw(3, "survivable").workload:
            raise KeyError("on purpose")
        return right(workload, job=job)

    monkeypatch.setattr(run_module, "truth_of", truth_of)
    with pytest.raises(
        SimulationFailed,
        match="on purpose(.|\n)*\nreplay: ecrm simulate --seed 3 --suite survivable$",
    ):
        run_range(range(2, 6), "survivable", jobs=1)


def test_a_range_says_how_far_it_is(monkeypatch):
    numbers = dict.fromkeys(("recoveries", "reshapes", "commits", "rows_checked", "calls"), 0)
    verdict = SimpleNamespace(refused=None, mix=Counter(), deaths=3, **numbers)
    monkeypatch.setattr(seed_range, "_run_some", lambda work: [verdict] * len(work[1]))
    out, seconds = io.StringIO(), itertools.count(0.0, 20.0)
    progress = Progress("fatal", out, lambda: next(seconds), "schedules", 30.0)
    run_range(range(100), "fatal", 1, progress)
    assert out.getvalue() == (
        "fatal: 40%  ETA 1m00s  40 schedules  120 ranks killed, nothing wrong  1 schedules/s\n"
        "fatal: 80%  ETA 20s  80 schedules  240 ranks killed, nothing wrong  1 schedules/s\n"
    )


def test_a_failure_in_another_process_names_its_seed():
    with pytest.raises(
        SimulationFailed, match="\nreplay: ecrm simulate --seed nonsense --suite survivable$"
    ):
        run_range([Nonsense()], "survivable", jobs=2)
    with pytest.raises(
        SimulationFailed,
        match="a process died(.|\n)*\nreplay: ecrm simulate --seeds 7:8 --suite survivable "
        "--jobs 1$",
    ):
        run_range([Deadly(7)], "survivable", jobs=2)


class Nonsense:
    """A seed that no schedule can be drawn from."""

    def __format__(self, spec):
        if sys._getframe(1).f_code.co_name == "draw":
            raise KeyError("on purpose")
        return "nonsense"


class Deadly(int):
    """A seed whose schedule kills the process."""

    def __format__(self, spec):
        if sys._getframe(1).f_code.co_name == "draw":
            os._exit(1)
        return str(int(self))


def test_every_commit_is_checked_when_it_is_made():
    """Those of steps, of rebuilding and scrubbing at the end, and one after each recovery."""
    workload = Workload(scrub_rows_per_step=16, rebuild_rows_per_step=1)
    engines, commits = {}, []
    checkers = Checkers(engines, set(), truth_of(workload))
    cluster = SimulatedCluster(workload.world_size, 0, [PhaseFault(1, 5, "update")])

    def program(transport):
        rank = transport.rank

        def phase(step, name):
            cluster.enter_phase(rank, step, name)
            checkers.at_phase(rank, name)

        def committed():
            commits.append(engines[rank].state.commits)
            checkers.after_commit(rank)

        try:
            hooks = Hooks(
                phase, committed=committed, recovered=lambda: checkers.after_recovery(rank)
            )
            run_workload(
                workload,
                transport,
                hooks,
                after_start=lambda engine: engines.update({rank: engine}),
            )
        finally:
            engines.pop(rank, None)

    assert len(cluster.run(program).killed) == 1
    assert checkers.commits == max(commits) > workload.steps + 4
    assert checkers.recoveries == 1


def test_a_commit_that_only_the_dead_have_seen_is_checked_again():
    doomed: set[int] = set()
    view = View(0, (0, 1, 2), (0,), (0,), (0,), domains=(0, 1, 2))
    engines = {
        rank: SimpleNamespace(
            committed=0,
            step=0,
            view=view,
            recovery=SimpleNamespace(rollbacks=0),
            state=SimpleNamespace(
                commits=0,
                dense=TinyDense(),
                log=StepLog(),
                hosted={},
                spaces=(),
                protection=NoProtection(1),
            ),
        )
        for rank in range(3)
    }
    checkers = Checkers(engines, doomed, Truth([], [TinyDense().value] * 2, [{}], {}))

    def accept(rank):
        engines[rank].state.commits = engines[rank].committed = 1
        checkers.after_commit(rank)
        return checkers.commits

    assert accept(0) == 1
    doomed.add(0)
    assert accept(1) == 2
    assert accept(2) == 2


def test_the_plain_arithmetic():
    circle = Circle(5, 2, 1)
    assert circle.stripe(4) == {4, 0, 1}
    assert [circle.meet(0, other) for other in range(5)] == [False, True, True, True, True]
    assert circle.most_units_on({0, 1}) == 2 and Circle(6, 2, 1).most_units_on({0, 3}) == 1
    view = View(1, (0, 1, 2, 4), (0, 1, 2, 0, 4), (0,), (0,), domains=(0, 1, 2, 3, 4))
    assert crowded(view, circle) == [0, 3] and widest_k(view, circle) == 2
    few = View(1, (0, 1), (0, 1, 0, 0, 1), (0,), (0,), domains=(0, 1, 2, 3, 4))
    assert widest_k(few, circle) is None

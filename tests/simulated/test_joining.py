"""Ranks that come back: admitted at a commit, as spares, then with slots and shards."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ecrm.engine import events
from ecrm.engine.hooks import Hooks, Introductions
from ecrm.testing.simulate.oracle import truth_of
from ecrm.testing.simulate.schedule import draw
from ecrm.testing.simulate.seed_range import run_range
from ecrm.testing.simulate.simulation import run_schedule
from ecrm.testing.simulate.workload import Workload, run_workload
from ecrm.testing.simulated_transport import RandomFaults, RankKilled, SimulatedCluster
from support.seeds import some_and_more

HOSTS = 4
ON_HOSTS = Workload(
    servers=4,
    trainers=4,
    slots=4,
    spares=0,
    steps=40,
    k=2,
    m=1,
    domains=tuple(rank % HOSTS for rank in range(8)),
    rebuild_rows_per_step=1000,
)


class Run:
    """A run with ranks that die at the phases in `kills`, {(rank, step, phase): how often}.

    `view` and `left` are the view and the failures to survive at the end; `told` are the events of
    all ranks.
    """

    def __init__(self, workload, kills, returns=1.0, seed=0, waits=3):
        self.told, self.tables = [], []
        left = dict(kills)

        def on_phase(rank, step, phase):
            if left.get((rank, step, phase), 0):
                left[rank, step, phase] -= 1
                raise RankKilled

        cluster = SimulatedCluster(
            workload.world_size,
            seed,
            RandomFaults(
                most=99, per_call=0.0, per_recovery_call=0.0, together=0.0, returns=returns,
                longest_return=waits,
            ),
            on_phase=on_phase,
        )  # fmt: skip

        def program(transport):
            def started(engine):
                self.engine = engine

            hooks = Hooks(
                phase=lambda step, phase: cluster.enter_phase(transport.rank, step, phase),
                event=lambda told: self.told.append((transport.rank, told)),
            )
            return run_workload(
                workload, transport, hooks, after_start=started, report=self.tables.append
            )

        self.results = cluster.run(program).results
        self.view, self.left = self.engine.view, self.engine.state.failures_left
        self.unfired = {kill for kill, times in left.items() if times}
        self.joins = {
            (told.epoch, tuple(told.ranks))
            for _, told in self.told
            if isinstance(told, events.Joined)
        }


def host(number, step, phase="forward"):
    return {(rank, step, phase): 1 for rank in range(8) if ON_HOSTS.domains[rank] == number}


def test_each_host_lost_and_back_in_turn_leaves_the_run_as_at_the_start():
    kills = {}
    for number in range(HOSTS):
        kills |= host(number, 5 + 8 * number)
    run = Run(ON_HOSTS, kills)
    assert not run.unfired and {rank for _, ranks in run.joins for rank in ranks} == set(range(8))
    assert run.tables == [truth_of(ON_HOSTS).tables] * len(run.tables) != []
    view, shape = run.view, run.engine.state.protection.shape
    assert view.live == tuple(range(8)) and run.left == 1
    assert (shape.shards, shape.k, shape.m) == (4, 2, 1)
    assert len({view.domains[rank] for rank in view.shards}) == len(set(view.slots)) == HOSTS


def test_without_ranks_that_come_back_less_is_left():
    """The twin: the same losses but for the last host's, and nobody comes back."""
    run = Run(ON_HOSTS, host(0, 5), returns=0.0)
    assert not run.joins and len(run.view.live) == 6
    assert run.tables == [truth_of(ON_HOSTS).tables]
    assert run.engine.state.protection.shape.shards == len(set(run.view.slots)) == 3


@pytest.mark.parametrize("phase", ["recover", "reshape", "lookup", "forward", "parity", "commit"])
@pytest.mark.parametrize("who", ["newcomer", "teller"])
def test_a_death_in_and_after_the_join_changes_no_bit(who, phase):
    workload = replace(ON_HOSTS, m=2, servers=5, domains=None, trainers=2, slots=2, spares=1)
    at = next(step for step in range(4, 20) if _joins_at(workload, step))
    rank = 4 if who == "newcomer" else 0
    if (who, phase) == ("newcomer", "recover"):
        at = 0  # the rank has not been told of the step yet
    times = {(4, 3, "forward"): 1, (rank, at, phase): 1}
    run = Run(workload, times)
    assert run.tables == [truth_of(workload).tables] * len(run.tables) != []
    assert run.view.live == tuple(range(workload.world_size)) and run.left == 2
    if phase in ("recover", "lookup", "parity"):  # ranks without slots have no pass, and so on
        assert not run.unfired


def _joins_at(workload, step):
    run = Run(workload, {(4, 3, "forward"): 1})
    return any(told.step == step for _, told in run.told if isinstance(told, events.Joined))


def test_a_rank_that_dies_again_and_again_comes_back_each_time():
    run = Run(ON_HOSTS, {(2, step, "lookup"): 1 for step in range(4, 36, 4)})
    assert len(run.joins) == 8 and not run.unfired
    assert run.tables == [truth_of(ON_HOSTS).tables] and run.left == 1


def test_a_run_that_ends_waits_for_no_rank():
    run = Run(ON_HOSTS, {(2, 39, "lookup"): 1}, waits=10_000)
    assert not run.joins and 2 not in run.results
    assert run.tables == [truth_of(ON_HOSTS).tables]


@pytest.mark.parametrize("seeds", some_and_more(8, 60))
def test_scripts_on_ranks_that_come_back_see_what_an_undisturbed_run_sees(seeds):
    """Evaluations, checkpoints, logs, schedulers and streams of sessions."""
    found = Counter()
    for seed in seeds:
        drawn = draw(seed, "sessions")
        kind = drawn.workload.kind
        if kind.exact and kind.keeps_deltas and not drawn.fatal and drawn.later is None:
            found += run_schedule(replace(drawn, returns=0.9, deaths=2 * drawn.deaths)).mix
    assert found["dead ranks that come back"] > len(seeds), found


def test_a_commit_told_to_a_newcomer_alone_ends_no_run():
    """A rank dies after it has told the newcomer, before the others hear of the commit."""
    assert run_range([233], "returning", jobs=1).refused == 0


@pytest.mark.parametrize("seeds", some_and_more(12, 300))
def test_schedules_with_ranks_that_come_back_finish_with_the_oracles_bits(seeds):
    totals = run_range(seeds, "returning", jobs=1)
    print(totals)
    hundreds = len(seeds) / 100
    assert totals.refused == 0 and totals.deaths > 500 * hundreds
    assert totals.mix["dead ranks that come back"] > 400 * hundreds


class Heard(Introductions):
    """Tells the name of this process, and keeps what it has heard."""

    def __init__(self, name):
        self.name, self.heard = name, []

    def about(self):
        return self.name

    def meet(self, facts):
        return dict(facts)

    def met(self, answers):
        assert all(answer == answers[0] for answer in answers.values())
        self.heard.append({int(rank): name for rank, name in answers[0].items()})


def test_all_ranks_are_introduced_to_each_other_when_ranks_join():
    workload, lives, introductions = replace(ON_HOSTS, steps=14), Counter(), []
    kills = host(1, 5)

    def on_phase(rank, step, phase):
        if kills.pop((rank, step, phase), 0):
            raise RankKilled

    faults = RandomFaults(
        most=99, per_call=0.0, per_recovery_call=0.0, together=0.0, returns=1.0, longest_return=3
    )
    cluster = SimulatedCluster(workload.world_size, 0, faults, on_phase=on_phase)

    def program(transport):
        lives[transport.rank] += 1
        heard = Heard(f"{transport.rank} in its life {lives[transport.rank]}")
        introductions.append((transport.rank, heard))

        def phase(step, name):
            cluster.enter_phase(transport.rank, step, name)

        return run_workload(workload, transport, Hooks(phase=phase, introductions=heard))

    cluster.run(program)
    assert {rank for rank, count in lives.items() if count == 2} == {1, 5}
    latest = dict(introductions)  # of the second lives, where there are two
    names = {rank: f"{rank} in its life {1 + (rank in (1, 5))}" for rank in range(8)}
    assert all(heard.heard[-1] == names for heard in latest.values())

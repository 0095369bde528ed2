"""Kills while rows are rebuilt: the finished model is the model of an undisturbed run.

The tables are large enough for a rebuild of many steps. Survivors decode background rows, so ranks
die between the legs of a round: units sent, rows decoded, rows handed on.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from ecrm.engine.hooks import Hooks
from ecrm.placement.tables import Table
from ecrm.placement.view import keeps_apart
from ecrm.protection.erasure import ErasureProtection
from ecrm.protection.rebuild import Rebuild, Unit
from ecrm.protection.rebuild_pace import RebuildPace
from ecrm.storage.hosted import HostedShard
from ecrm.testing.simulate.oracle import truth_of
from ecrm.testing.simulate.schedule import draw
from ecrm.testing.simulate.simulation import Failed, run_schedule
from ecrm.testing.simulate.workload import Workload, run_workload
from ecrm.testing.simulated_transport import PhaseFault, SimulatedCluster
from support.seeds import some_and_more

TABLES = (Table("a", 400, 4), Table("b", 150, 8))


def _schedule(seed: int, **more):
    """A schedule with long rebuilds, many deaths, stripes of several data units."""
    rng = random.Random(f"rebuilding {seed}")
    k, m = rng.choice(((2, 1), (3, 1), (2, 2), (4, 2), (2, 3)))
    workload = Workload(
        seed=seed,
        tables=TABLES,
        steps=14,
        slots=2,
        trainers=2,
        servers=k + m + rng.choice((0, 1, 3)),
        spares=rng.choice((0, 1, 3)),
        k=k,
        m=m,
        ids_per_slot=rng.choice((4, 40)),
        rebuild_rows_per_step=rng.choice((2, 8, 30)),
        rebuild_share=rng.choice((1.0, 0.05)),
        commit_interval=rng.choice((1, 1, 3)),
        right_hints=rng.random() < 0.5,
        look_ahead=rng.random() < 0.8,
        looks_between=rng.random() < 0.2,
        reshape=rng.random() < 0.5,
        layout=rng.choice(("dedicated", "dedicated", "colocated")),
        shards_per_server=rng.choice((1, 1, 3)),
    )
    return replace(
        draw(seed, "survivable"),
        workload=replace(workload, **more),
        deaths=4,
        call_death=0.008,
        phase_death=0.01,
        cascade=0.05,
        together=0.3,
        lost_touch=0.0,
    )


@pytest.fixture
def legs(monkeypatch):
    """Counts of groups: decoded by survivors, taken by new hosts, decoded by new hosts."""
    counts: Counter[str] = Counter()
    decode, fill = Rebuild._decode, Rebuild._fill

    def decoding(self, unit, sent):
        if type(unit) is Unit:
            counts["decoded by a survivor"] += 1
        return decode(self, unit, sent)

    def filling(self, group, local, records):
        counts["taken" if group.decoder != self._me else "decoded by the new host"] += 1
        target = self._target(group)
        if target.missing is None or not target.missing.among(local).all():
            counts["back already"] += 1
        return fill(self, group, local, records)

    monkeypatch.setattr(Rebuild, "_decode", decoding)
    monkeypatch.setattr(Rebuild, "_fill", filling)
    return counts


@pytest.mark.parametrize("seeds", some_and_more(12, 400))
def test_ranks_die_while_rows_are_rebuilt(legs, seeds):
    died = sum(run_schedule(_schedule(seed)).deaths for seed in seeds)
    assert died > len(seeds)
    assert legs["decoded by a survivor"] > legs["taken"] > 2 * len(seeds), legs
    assert legs["decoded by the new host"] and legs["back already"], legs


@pytest.mark.parametrize(
    "second",
    [
        "parity",
        "repair",
        "recover",
        *(pytest.param(phase, marks=pytest.mark.drill) for phase in ("update", "dense", "commit")),
    ],
)
@pytest.mark.parametrize(
    ("shape", "first", "then"),
    [
        pytest.param({"spares": 2}, (1,), 6, id="the new host"),
        pytest.param({"spares": 2, "k": 2, "m": 2, "servers": 5}, (1,), 2, id="a decoder"),
        pytest.param({"spares": 0, "k": 2, "m": 2, "servers": 7}, (1,), 3, id="without spares"),
        pytest.param({"spares": 3, "k": 2, "m": 2, "servers": 5}, (1, 2), 7, id="two lost"),
    ],
)
def test_a_second_death_in_any_phase_of_a_rebuild(shape, first, then, second):
    """The new host of a lost shard dies, or a survivor that decodes; of one or two lost shards."""
    workload = Workload(
        tables=TABLES,
        steps=14,
        rebuild_rows_per_step=12,
        ids_per_slot=40,
        reshape=False,
        **shape,
    )
    truth, cut = truth_of(workload), 0
    at = 8 if second != "recover" else 4
    faults = [*(PhaseFault(rank, 4, "parity") for rank in first), PhaseFault(then, at, second)]
    cluster, reported = SimulatedCluster(workload.world_size, "second", faults), []

    def program(transport):
        engines = []

        def phase(step, name):
            nonlocal cut
            if (step, name) == (at, second) and engines[0].view.rebuilding:
                cut += 1
            cluster.enter_phase(transport.rank, step, name)

        return run_workload(
            workload,
            transport,
            Hooks(phase=phase),
            after_start=engines.append,
            report=reported.append,
        )

    outcome = cluster.run(program)
    assert reported and all(tables == truth.tables for tables in reported)
    assert {result.verified.mismatches for result in outcome.results.values()} == {0}
    assert cut or second == "recover", "no shard was rebuilding at the second death"


@pytest.mark.parametrize(("spares", "heirs"), [(0, 3), (2, 2)])
def test_the_shards_of_a_server_go_to_several_ranks(spares, heirs):
    """To survivors or to spares, and no stripe has two units on a rank."""
    workload = Workload(
        tables=TABLES,
        steps=14,
        servers=8,
        k=2,
        spares=spares,
        trainers=8,
        slots=8,
        layout="colocated",
        shards_per_server=3,
        rebuild_rows_per_step=40,
        ids_per_slot=10,
    )
    one = truth_of(replace(workload, shards_per_server=1))
    cluster, views = (
        SimulatedCluster(workload.world_size, "several", [PhaseFault(3, 4, "dense")]),
        [],
    )
    reported = []

    def program(transport):
        hooks = Hooks(phase=lambda step, name: cluster.enter_phase(transport.rank, step, name))
        return run_workload(
            workload,
            transport,
            hooks,
            after_step=lambda engine: views.append(engine.view),
            report=reported.append,
        )

    cluster.run(program)
    assert reported == [one.tables]
    before, after = views[0], views[-1]
    shape = workload.make_protection().shape
    assert before.shards_of(3) == (3, 11, 19) and keeps_apart(before, shape)
    assert len({after.shards[shard] for shard in (3, 11, 19)}) == heirs and keeps_apart(
        after, shape
    )
    rebuilding = [view.rebuilding for view in views if view.rebuilding]
    assert (3, 11, 19) in rebuilding and len(after.shards) == 24


def test_hosts_may_choose_any_pace_without_a_word_to_others(monkeypatch):
    """Two shards rebuild on two hosts, with clocks that disagree wildly."""
    monkeypatch.setattr("ecrm.protection.rebuild_pace.WINDOW", 6)
    monkeypatch.setattr("ecrm.protection.rebuild_pace.FACTOR", 4.0)
    workload = Workload(
        tables=(Table("a", 6000, 4),),
        steps=60,
        servers=6,
        k=2,
        m=2,
        spares=2,
        slots=2,
        ids_per_slot=600,
        rebuild_rows_per_step=0,
        rebuild_share=0.05,
        reshape=False,
    )
    truth, chosen = truth_of(workload), {}
    faults = [PhaseFault(1, 20, "parity"), PhaseFault(2, 20, "parity")]
    cluster, reported = SimulatedCluster(workload.world_size, "paces", faults), []

    def program(transport):
        rng, now = random.Random(transport.rank), 0.0

        def clock():
            nonlocal now
            now += rng.random() * (1 + transport.rank)
            return now

        def after_start(engine):
            engine.state.pace = RebuildPace(0.05, 0, 20)
            engine.state.pace._rows = 15

        def after_step(engine):
            if set(engine.view.shards_of(engine.rank)) & set(engine.view.rebuilding):
                chosen.setdefault(engine.rank, []).append(engine.state.pace.rows(engine.step))

        hooks = Hooks(phase=lambda step, name: cluster.enter_phase(transport.rank, step, name))
        return run_workload(
            workload,
            transport,
            hooks,
            clock=clock,
            after_start=after_start,
            after_step=after_step,
            report=reported.append,
        )

    cluster.run(program)
    assert reported == [truth.tables]
    assert len(chosen) == 2 and all(0 in rows for rows in chosen.values())
    first, second = chosen.values()
    assert first != second and len({*first, *second}) > 3, chosen


def test_steps_keep_their_pace_of_before_the_failure(monkeypatch):
    """Time is made up: a step has 100 ms, 2 more while rows are missing, and 0.4 a row."""
    monkeypatch.setattr("ecrm.protection.rebuild_pace.LEAST_ROWS", 1)
    workload = Workload(
        tables=(Table("a", 6000, 4),),
        steps=150,
        servers=4,
        k=2,
        m=1,
        spares=1,
        slots=1,
        trainers=1,
        ids_per_slot=400,
        rebuild_rows_per_step=0,
        rebuild_share=0.05,
        reshape=False,
    )
    cluster = SimulatedCluster(workload.world_size, "kept", [PhaseFault(1, 30, "parity")])
    heir, spent, reported = workload.world_size - 1, [], []

    def program(transport):
        now, engines = [0.0], []

        def after_start(engine):
            engine.state.pace = RebuildPace(0.05, 0, 20)
            engine.state.pace._rows = 6
            engines.append(engine)

        def phase(step, name):
            cluster.enter_phase(transport.rank, step, name)
            if name != "input" or not engines:
                return
            (engine,) = engines
            missing = bool(engine.view.rebuilding)
            milliseconds = 100 + missing * (2 + 0.4 * engine.state.pace.rows(step))
            now[0] += milliseconds / 1e3
            if missing and transport.rank == heir:
                spent.append(milliseconds)

        return run_workload(
            workload,
            transport,
            Hooks(phase=phase),
            clock=lambda: now[0],
            after_start=after_start,
            report=reported.append,
        )

    cluster.run(program)
    assert reported == [truth_of(workload).tables]
    later = spent[48:96]
    assert len(later) == 48, len(spent)
    assert 100 * len(later) / sum(later) == pytest.approx(0.95, abs=0.003)


def _deltas_first(monkeypatch):
    """Decoded parity comes without the deltas of its step."""
    take, committed = Rebuild.take, ErasureProtection.committed
    late = []

    def taking(self, received):
        late.append((self, received))

    def committing(self):
        mine = [entry for entry in late if entry[0]._context is self._context]
        for done, received in mine:
            late.remove((done, received))
            take(done, received)
        committed(self)

    monkeypatch.setattr(Rebuild, "take", taking)
    monkeypatch.setattr(ErasureProtection, "committed", committing)


def _fills_twice(monkeypatch):
    """A row on its way and asked for meanwhile is counted twice."""

    def over(self, group, local, records):
        target = self._target(group)
        target.restore(local, records)
        if isinstance(target, HostedShard):
            target.on_demand_rows += group.asked

    monkeypatch.setattr(Rebuild, "_fill", over)


def _forgets_an_undo(monkeypatch):
    """Rows of a step taken back are handed on."""
    undo = ErasureProtection.undo
    adopt = ErasureProtection.adopt

    def keeping(self, how, *view):
        due = self._due
        how(self, *view)
        self._due = due

    monkeypatch.setattr(ErasureProtection, "undo", lambda self: keeping(self, undo))
    monkeypatch.setattr(
        ErasureProtection, "adopt", lambda self, *view, **more: keeping(self, adopt, *view)
    )


@pytest.mark.parametrize("breaks", [_deltas_first, _fills_twice, _forgets_an_undo])
def test_a_broken_leg_is_caught(monkeypatch, breaks):
    breaks(monkeypatch)
    with pytest.raises(Failed):
        for seed in range(60):
            run_schedule(_schedule(seed, right_hints=False, ids_per_slot=40))


def test_rows_on_their_way_are_not_asked_for_again(monkeypatch):
    """Each background row is decoded once; only a row that a slot asks for may come twice."""
    workload = Workload(
        tables=(Table("a", 2000, 4),),
        steps=30,
        rebuild_rows_per_step=20,
        ids_per_slot=300,
        right_hints=True,
        reshape=False,
    )
    cluster = SimulatedCluster(workload.world_size, "once", [PhaseFault(1, 20, "parity")])
    asked: Counter[tuple[int, int, int]] = Counter()
    choose = Rebuild._choose

    def choosing(self, *how):
        asks = choose(self, *how)
        for group in asks:
            if not getattr(group, "asked", True):
                asked.update((group.space, group.unit, row) for row in group.local.tolist())
        return asks

    monkeypatch.setattr(Rebuild, "_choose", choosing)

    def program(transport):
        hooks = Hooks(phase=lambda step, name: cluster.enter_phase(transport.rank, step, name))
        return run_workload(workload, transport, hooks)

    cluster.run(program)
    assert len(asked) > 100 and set(asked.values()) == {1}

"""Single parts of the engine: sums split over holders, and piggyback messages on an exchange."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import ecrm.testing.simulate.workload as workload_module
from ecrm.device.pinned import rows_to_send
from ecrm.engine import events
from ecrm.engine.computed import Computed
from ecrm.engine.dense import SlicedSum
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks, StepAborted
from ecrm.engine.state import EngineState
from ecrm.engine.step_replay import StepReplay
from ecrm.placement.tables import Table
from ecrm.placement.view import View
from ecrm.process.counted_transport import CountedTransport
from ecrm.protection.rebuild import Group, Rebuild
from ecrm.run.profile import Profile, ProfiledTransport
from ecrm.testing.simulate.oracle import truth_of
from ecrm.testing.simulate.workload import (
    TinyDense,
    Workload,
    make_engine,
    run_workload,
    train_step,
)
from ecrm.testing.simulated_transport import PhaseFault, RandomFaults, SimulatedCluster
from ecrm.transport.base import WrappedTransport
from ecrm.transport.piggyback import exchange, exchange_rounds


@pytest.mark.parametrize("holders", [(3,), (0, 2), (1, 4, 5, 9)])
@pytest.mark.parametrize("size", [1, 3, 1001])
def test_a_sum_in_slices_has_the_bits_of_the_sum_in_slot_order(holders, size):
    contributions = {
        slot: torch.randn(size, generator=torch.Generator().manual_seed(slot))
        for slot in (2, 0, 1, 7)
    }
    expected = contributions[0].clone()
    for slot in (1, 2, 7):
        expected += contributions[slot]
    sums = SlicedSum(holders)
    cut = {slot: sums.slices(contribution) for slot, contribution in contributions.items()}
    by_holder = {
        holder: sums.reduce({slot: parts[holder] for slot, parts in cut.items()})
        for holder in holders
    }
    assert torch.equal(sums.assemble(by_holder), expected)


def test_what_is_attached_travels_in_the_same_exchange_and_comes_out_apart():
    def program(inner):
        transport, rank = Counting(inner), inner.rank
        attached = {} if rank == 2 else {2: [torch.tensor([rank]), torch.tensor([7.0])]}
        outgoing = {(rank + 1) % 3: [torch.tensor([10 + rank])]}
        received, collected = exchange(transport, outgoing, attached)
        before = (rank - 1) % 3
        assert in_lists(received) == {before: [[10 + before]]}
        assert in_lists(collected) == ({0: [[0], [7.0]], 1: [[1], [7.0]]} if rank == 2 else {})
        received, collected = exchange(transport, outgoing)
        assert in_lists(received) == {before: [[10 + before]]} and collected is None
        assert transport.exchanges == 2
        return True

    outcome = SimulatedCluster(3, "attached", []).run(program)
    assert outcome.results == {0: True, 1: True, 2: True}


def in_lists(messages):
    return {sender: [tensor.tolist() for tensor in tensors] for sender, tensors in messages.items()}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_rounds_make_their_exchanges_and_the_first_takes_along_what_is_attached(count):
    def program(inner):
        transport, rank, seen = Counting(inner), inner.rank, []

        def rounds():
            for number in range(count):
                seen.append((yield {(rank + 1) % 3: [torch.tensor([number])]}))

        collected = exchange_rounds(transport, rounds(), attached={0: [torch.tensor([rank])]})
        before = (rank - 1) % 3
        assert [in_lists(received) for received in seen] == [
            {before: [[number]]} for number in range(count)
        ]
        assert transport.exchanges == count
        if count:
            assert in_lists(collected) == ({r: [[r]] for r in range(3)} if rank == 0 else {})
        else:
            assert collected is None
        return True

    outcome = SimulatedCluster(3, "rounds", []).run(program)
    assert outcome.results == {0: True, 1: True, 2: True}


def test_that_a_rank_sleeps_reaches_the_transport_within_all_others():
    inner = SimpleNamespace(rank=0, sleeps=False)
    wrapped = ProfiledTransport(CountedTransport(inner, None), Profile(0))
    wrapped.sleeps = True
    assert inner.sleeps and wrapped.sleeps


@pytest.mark.parametrize("dead", [None, 1, 4, 5])
def test_the_state_of_a_slot_reaches_every_holder_whole_and_once_a_step(monkeypatch, dead):
    """Slot 1 sends something of another size each step; slot 0 sends nothing.

    A server or a trainer dies after states have come, so that the step is done again.
    """
    workload = Workload(steps=5)
    faults = [] if dead is None else [PhaseFault(dead, 2, "parity")]
    cluster = SimulatedCluster(workload.world_size, "states", faults)
    plain = TinyDense.apply

    def state_of(step):
        return torch.arange(3 * step, dtype=torch.uint8) + step

    def apply_and_note(self, total, states):
        plain(self, total, states)
        self.came = [*getattr(self, "came", []), {slot: s.tolist() for slot, s in states.items()}]

    monkeypatch.setattr(TinyDense, "apply", apply_and_note)

    def program(transport):
        hooks = Hooks(phase=lambda step, name: cluster.enter_phase(transport.rank, step, name))
        engine, computed = make_engine(workload, transport, hooks, lambda: 0.0), Computed()
        apply = engine.apply

        def apply_with_state(given):
            states = {1: state_of(engine.step)} if 1 in engine.slots else {}
            apply(replace(given, slot_state=states))

        engine.apply = apply_with_state
        while engine.step < workload.steps:
            try:
                train_step(workload, engine, computed)
            except StepAborted:
                continue
        return engine.state.dense and engine.state.dense.came

    outcome = cluster.run(program)
    assert [kill.rank for kill in outcome.killed] == ([] if dead is None else [dead])
    whole = [{1: state_of(step).tolist()} for step in range(workload.steps)]
    came = [held for held in outcome.results.values() if held is not None]
    assert len(came) == 2
    for held in came:  # one that took the place of the dead has come later
        assert held == whole[-len(held) :] and len(held) >= workload.steps - 3


class Counting(WrappedTransport):
    """Counts exchanges."""

    exchanges = 0

    def exchange(self, outgoing):
        self.exchanges += 1
        return self.inner.exchange(outgoing)


@pytest.mark.parametrize("looks_ahead", [True, False])
def test_a_slot_that_asks_no_row_of_a_space_gets_none_of_its_width(monkeypatch, looks_ahead):
    """In some steps a slot asks one space, in some none, and in one step nobody asks anything."""
    asked, lookup = workload_module.rows_of, Engine.lookup

    def asking(workload, step, slot):
        return [
            rows[:0] if (step + slot + space) % 3 == 0 or step == 4 else rows
            for space, rows in enumerate(asked(workload, step, slot))
        ]

    shapes = []

    def looking_up(self, rows, *more, **words):
        values = lookup(self, rows, *more, **words)
        for slot, spaces in values.items():
            assert [tuple(value.shape) for value in spaces] == [
                (wanted.numel(), space.dim)
                for wanted, space in zip(rows[slot], self.state.spaces, strict=True)
            ]
            shapes.extend(value.shape for value in spaces)
        return values

    monkeypatch.setattr(workload_module, "rows_of", asking)
    monkeypatch.setattr(Engine, "lookup", looking_up)
    workload = Workload(steps=8, look_ahead=looks_ahead)
    truth, reported = truth_of(workload), []
    assert {(0, 8), (0, 4)} < set(shapes)
    cluster = SimulatedCluster(workload.world_size, "empty", [PhaseFault(1, 4, "parity")])

    def program(transport):
        hooks = Hooks(phase=lambda step, name: cluster.enter_phase(transport.rank, step, name))
        return run_workload(workload, transport, hooks, report=reported.append)

    outcome = cluster.run(program)
    assert [kill.rank for kill in outcome.killed] == [1]
    assert reported == [truth.tables]


def test_a_step_has_two_exchanges_also_while_a_shard_is_rebuilt_but_for_the_first_two():
    workload = Workload(
        tables=(Table("a", 600, 4),),
        steps=24,
        slots=1,
        trainers=1,
        spares=1,
        reshape=False,
        rebuild_rows_per_step=8,
        ids_per_slot=30,
        right_hints=True,
    )
    cluster = SimulatedCluster(workload.world_size, "exchanges", [PhaseFault(1, 4, "parity")])
    steps: list[tuple[bool, int]] = []

    def program(inner):
        transport = Counting(inner)

        def after_step(engine):
            if inner.rank == 0:
                steps.append(
                    (
                        bool(engine.view.rebuilding),
                        transport.exchanges - sum(count for _, count in steps),
                    )
                )

        hooks = Hooks(phase=lambda step, name: cluster.enter_phase(inner.rank, step, name))
        return run_workload(workload, transport, hooks, after_step=after_step)

    cluster.run(program)
    began = [rebuilding for rebuilding, _ in steps].index(True)
    ended = [rebuilding for rebuilding, _ in steps].index(False, began)
    assert ended - began > 5 and ended < len(steps) - 2
    assert {count for _, count in steps[1:began]} == {2}
    # what slots ask for in this step was not asked for a step before
    assert steps[began + 1] == (True, 4)
    assert {count for _, count in steps[began + 2 : -1]} == {2}


@pytest.mark.parametrize(
    ("dead", "phase", "again", "exchanges"),
    [
        (1, "parity", [], 2),
        (1, "dense", [], 2),
        (1, "commit", [], 2),
        (6, "parity", [], 2),
        (4, "parity", [(4, 0)], 4),
        (5, "update", [(4, 1)], 4),
    ],
)
def test_slots_that_live_on_compute_a_step_once_and_wait_for_no_row_when_it_is_done_again(
    monkeypatch, dead, phase, again, exchanges
):
    """Ranks 4 and 5 run one slot each and rank 6 is a spare, which takes over a dead rank's slot.

    With all slots there, the ledger says which rows are asked for. The step then takes the two
    exchanges of every step.
    """
    workload = Workload(steps=8, reshape=False)
    truth = truth_of(workload)
    cluster = SimulatedCluster(workload.world_size, "computed", [PhaseFault(dead, 4, phase)])
    computed, reported, recovered, finished, lookup = [], [], [], [], Engine.lookup

    def looking_up(self, rows, *more, **words):
        values = lookup(self, rows, *more, **words)
        computed.extend((self.step, slot) for slot in values)
        return values

    monkeypatch.setattr(Engine, "lookup", looking_up)

    def program(inner):
        transport = Counting(inner)

        def after_step(engine):
            if inner.rank == 0 and engine.step == 5:
                finished.append(transport.exchanges)

        hooks = Hooks(
            phase=lambda step, name: cluster.enter_phase(inner.rank, step, name),
            recovered=lambda: recovered.append(transport.exchanges) if inner.rank == 0 else None,
        )
        return run_workload(
            workload, transport, hooks, after_step=after_step, report=reported.append
        )

    cluster.run(program)
    assert reported == [truth.tables]
    assert sorted(computed) == sorted(
        [*((step, slot) for step in range(8) for slot in range(2)), *again]
    )
    assert finished[0] - recovered[0] == exchanges


@pytest.mark.parametrize(
    ("shards", "replayed"),
    [
        pytest.param((3, 1, 2), True, id="only the lost shard has a new host"),
        pytest.param((3, 2, 1), False, id="shards of live hosts have new hosts, too"),
    ],
)
def test_a_step_is_replayed_if_only_hosts_of_lost_shards_lack_its_requests(shards, replayed):
    before = View(epoch=0, live=(0, 1, 2, 3), shards=(0, 1, 2), slots=(1, 2), dense=(1, 2))
    view = replace(before, epoch=1, live=(1, 2, 3), shards=shards, rebuilding=(0,))
    lookup = SimpleNamespace(again=lambda context, told: "replayed")
    replay = StepReplay(4, lookup, before)
    found = replay.again(SimpleNamespace(view=view), before, view.live, {})
    assert found == ("replayed" if replayed else None)


def test_the_event_of_a_new_layout_counts_every_row_ever_updated_once():
    workload = Workload(
        layout="colocated", servers=4, spares=0, steps=8, k=3, m=1, rebuild_rows_per_step=100
    )
    cluster, told = SimulatedCluster(4, 0, [PhaseFault(1, 1, "parity")]), []

    def program(transport):
        hooks = Hooks(
            phase=lambda step, name: cluster.enter_phase(transport.rank, step, name),
            event=told.append,
        )
        return run_workload(workload, transport, hooks)

    cluster.run(program)
    [(step, moved)] = {
        (event.step, event.moved_bytes) for event in told if isinstance(event, events.Reshaped)
    }
    records = truth_of(workload).records
    rows = zip(records[0], records[step], strict=True)
    updated = [now[(now != at_first).any(1)] for at_first, now in rows]
    assert moved == sum(each.numel() for each in updated) > 0


@pytest.mark.parametrize("slots_on", ["cpu", "meta"])
def test_rows_for_slots_are_pinned_unless_slots_are_on_the_cpu(monkeypatch, slots_on):
    monkeypatch.setattr(
        workload_module,
        "Engine",
        lambda **given: Engine(**given, slots_on=torch.device(slots_on)),
    )
    workload = Workload(servers=1, trainers=1, layout="colocated", protection="none", k=1, m=0)

    def program(transport):
        return make_engine(workload, transport, Hooks(), lambda: 0.0).state.row_memory

    found = SimulatedCluster(1, 0).run(program).results[0]
    assert found is (torch.empty if slots_on == "cpu" else rows_to_send)


@pytest.mark.parametrize(
    ("step", "confirmed", "exact", "kept"),
    [
        ("1000", True, True, True),
        ("1001", True, True, False),
        ("1000", False, True, False),
        ("1000", True, False, False),
    ],
)
def test_results_are_kept_for_the_same_step_over_confirmed_exact_rows(step, confirmed, exact, kept):
    def engine(step, confirmed, exact):
        state = SimpleNamespace(protection=SimpleNamespace(exact=exact))
        return SimpleNamespace(step=int(step), confirmed=confirmed, state=state)

    computed = Computed()
    computed.begin(engine("1000", True, True))
    computed[0] = "result"
    computed.begin(engine(step, confirmed, exact))
    assert computed == ({0: "result"} if kept else {})


@pytest.mark.parametrize(
    ("left", "share"), [({1: 5}, 0.25), ({1: 0, 2: 0}, 1.0), ({1: 2, 2: 3}, 0.75)]
)
def test_the_share_rebuilt_is_of_the_rows_of_all_rebuilding_shards(left, share):
    """A shard without a count is missing as a whole: here 6 data rows and 4 parity rows."""
    layouts = [SimpleNamespace(data_rows_per_shard=6, parity_rows_per_shard=4)]
    state = SimpleNamespace(
        layouts=layouts, view=SimpleNamespace(rebuilding=(1, 2)), rebuild_left=left
    )
    assert EngineState.rebuild_fraction.fget(state) == share
    state.view.rebuilding = ()
    assert EngineState.rebuild_fraction.fget(state) == 1.0


def _shapes():
    yield from ({"k": 3, "m": 1}, {"k": 3, "m": 1, "spares": 0, "servers": 5, "reshape": False})
    yield from (
        {"k": 2, "m": 2, "spares": 0, "servers": 6},
        {"k": 2, "m": 2, "spares": 2, "scrub_rows_per_step": 8},
    )
    yield {"k": 2, "m": 1, "layout": "colocated", "servers": 4, "spares": 1, "trainers": 4}
    yield from (
        {"k": 1, "m": 1, "protection": "chain", "servers": 3},
        {"k": 1, "m": 1, "protection": "replicate", "servers": 3},
    )


@pytest.mark.parametrize("shape", list(_shapes()), ids=str)
@pytest.mark.parametrize(
    "phase",
    [
        "parity",
        *(pytest.param(phase, marks=pytest.mark.drill) for phase in ("update", "dense", "commit")),
    ],
)
def test_a_step_resumed_after_any_death_comes_to_the_same(monkeypatch, shape, phase):
    """Each rank dies in turn.

    Another one dies as soon as the first recovery begins, and two die at once where the protection
    promises to survive that.
    """
    workload = Workload(steps=9, slots=2, rebuild_rows_per_step=1, **shape)
    truth, resumed, right = truth_of(workload), [], StepReplay.again

    def again(self, *words):
        lookup = right(self, *words)
        resumed.append((lookup is not None, bool(lookup and lookup.repair)))
        return lookup

    monkeypatch.setattr(StepReplay, "again", again)
    for rank in range(workload.world_size - workload.spares):
        deaths, mate = [[PhaseFault(rank, 3, phase)]], (rank + 1) % workload.servers
        if workload.m > 1 and rank < workload.servers:
            deaths += [
                [PhaseFault(rank, 3, phase), fault]
                for fault in (
                    PhaseFault(mate, 5, phase),
                    PhaseFault(mate, 3, phase),
                    PhaseFault(mate, 3, "recover"),
                )
            ]
        for faults in deaths:
            cluster, reported = SimulatedCluster(workload.world_size, "again", faults), []

            def program(transport):
                hooks = Hooks(
                    phase=lambda step, name: cluster.enter_phase(transport.rank, step, name)
                )
                return run_workload(workload, transport, hooks, report=reported.append)

            outcome = cluster.run(program)
            assert all(tables == truth.tables for tables in reported) and reported
            assert {result.verified.mismatches for result in outcome.results.values()} == {0}
    if phase != "update" and workload.protection != "replicate":
        assert (True, True) in resumed


@pytest.mark.parametrize(
    ("turn", "busy", "chosen"),
    [
        (0, {}, 6),
        (1, {}, 5),
        (2, {}, 4),
        (0, {6: 1}, 4),
        (1, {4: 2, 5: 9, 6: 3}, 4),
    ],
)
def test_the_host_with_the_fewest_rows_decodes_and_equal_hosts_take_turns(turn, busy, chosen):
    shape = SimpleNamespace(
        residue_of_unit=lambda shard, unit: 0, shard_of_unit=lambda residue, source: source
    )
    rebuild = SimpleNamespace(
        _shape=shape,
        _view=SimpleNamespace(shards=(4, 5, 6)),
        _context=SimpleNamespace(committed=turn),
        _decoders=Counter(busy),
    )
    group = SimpleNamespace(shard=0, unit=0, sources=(0, 1, 2), local=torch.arange(7))
    assert Rebuild._least_busy(rebuild, group) == chosen
    assert rebuild._decoders[chosen] == busy.get(chosen, 0) + 7


def test_a_round_of_repair_answers_first_what_is_wanted_and_stays_within_its_budget(monkeypatch):
    """The first piece after a failure brings nothing else.

    Rows that were never updated come back by probing, without decoding.
    """
    workload = Workload(
        tables=(Table("a", 2000, 4),),
        steps=16,
        slots=1,
        trainers=1,
        spares=1,
        reshape=False,
        rebuild_rows_per_step=8,
    )
    cluster = SimulatedCluster(workload.world_size, "rounds", [PhaseFault(1, 4, "parity")])
    rounds, answered, early, decoded = [], [], [], []
    choose, answer, fill = Rebuild._choose, Rebuild._answers, Rebuild._fill
    decoders = Counter()

    def choosing(self, wanted, soon, budget, on_their_way):
        asks = choose(self, wanted, soon, budget, on_their_way)
        groups = [ask for ask in asks if isinstance(ask, Group)]
        if asks:
            asked = sum(ask.asked for ask in groups)
            rounds.append((asked, sum(ask.local.numel() for ask in groups) - asked, budget))
        every = [
            (ask.shard, ask.space, ask.unit, row) for ask in groups for row in ask.local.tolist()
        ]
        assert len(set(every)) == len(every)
        early.extend(ask for ask in groups if ask.asked and not ask.wanted)
        return asks

    def answering(self, wanted):
        answers = answer(self, wanted)
        kinds = {(rank, entry[0], entry[3]): entry[4] for rank, entry, _ in self._asked}
        sent = [kinds[head] for tensors in answers.values() for head in tensors[::2]]
        answered.extend((wanted, bool(kind)) for kind in sent)
        return answers

    def filling(self, group, local, records):
        decoded.extend(records[group.asked :])
        if not group.asked:
            decoders[group.decoder] += 1
        return fill(self, group, local, records)

    monkeypatch.setattr(Rebuild, "_choose", choosing)
    monkeypatch.setattr(Rebuild, "_answers", answering)
    monkeypatch.setattr(Rebuild, "_fill", filling)

    def program(transport):
        hooks = Hooks(phase=lambda step, name: cluster.enter_phase(transport.rank, step, name))
        return run_workload(workload, transport, hooks)

    cluster.run(program)
    # all survivors decode background rows for the new host, rank 5
    assert set(decoders) == {0, 2, 3} and min(decoders.values()) > max(decoders.values()) / 3
    assert set(answered) == {(True, True), (False, False)}
    assert early
    assert all(background <= max(budget - asked, 0) for asked, background, budget in rounds)
    assert [budget for _, _, budget in rounds] == [0] + [8] * (len(rounds) - 1)
    assert rounds[0][0] > 0
    # the background decodes no record of zeros
    assert decoded and all(bool(record.any()) for record in decoded)
    # of 504 + 168 rows lost
    assert len(rounds) > 3 and sum(asked + background for asked, background, _ in rounds) < 200


def test_all_ranks_give_one_account_of_a_death():
    """Survivors notice the death in different phases.

    One of them may know of a commit that another does not. Any of them may write events and the
    summary.
    """
    accounts: dict[tuple, set] = {}
    phases: dict[int, str] = {}
    noticed: dict[int, set] = {}
    for seed in range(25):
        workload = Workload(
            seed=seed, steps=10, commit_interval=1 + seed % 3, k=2, m=2, servers=4, spares=2
        )
        cluster = SimulatedCluster(workload.world_size, seed, RandomFaults(most=2, per_call=0.01))

        def program(transport, seed=seed, cluster=cluster, workload=workload):
            rank = transport.rank

            def phase(step, name):
                if name == "recover":
                    noticed.setdefault(seed, set()).add(phases[rank])
                phases[rank] = name
                cluster.enter_phase(rank, step, name)

            def event(told):
                if isinstance(told, events.Failure):
                    account = told.step, told.phase, told.redone_steps
                    accounts.setdefault((seed, *told.ranks), set()).add(account)

            return run_workload(workload, transport, Hooks(phase, event))

        cluster.run(program)
    assert len(accounts) > 15 and any(len(names) > 1 for names in noticed.values())
    assert {key: said for key, said in accounts.items() if len(said) > 1} == {}

"""Scrubbing on the simulated cluster: flipped bits are found, located and corrected."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ecrm.placement.stripes import StripeShape
from ecrm.placement.tables import Table
from ecrm.protection.coding import ReedSolomon
from ecrm.protection.coding.code import find_wrong_unit
from ecrm.protection.scrub import Scrub, _Window
from ecrm.testing.simulate.oracle import truth_of
from ecrm.testing.simulate.workload import Workload, rows_of, run_workload
from ecrm.testing.simulated_transport import (
    AFTER,
    BEFORE,
    DURING,
    Fault,
    PhaseFault,
    SimulatedCluster,
)
from support.telling import noted_in

WHOLE = 1000
"""So many rows per scrub that one check covers a whole row space.

The two row spaces of the workload take turns.
"""

ROWS = 150
"""Rows of row space 0."""


class Flip:
    """One bit of a unit flips when a phase of a step begins, in whichever rank hosts it."""

    def __init__(self, step, phase, space, stripe, unit, kind="row"):
        self.step, self.phase, self.space, self.stripe, self.unit, self.kind = (
            step,
            phase,
            space,
            stripe,
            unit,
            kind,
        )
        self.done = False

    def shard(self, shape):
        return shape.shard_of_unit(self.stripe % shape.shards, self.unit)

    def __call__(self, engine, step, phase):
        shape = engine.state.protection.shape
        shard = self.shard(shape)
        if (
            self.done
            or (step, phase) != (self.step, self.phase)
            or engine.view.shards[shard] != engine.rank
        ):
            return
        self.done = True
        local = int(
            engine.state.layouts[self.space].local_of_unit(torch.tensor([self.stripe]), self.unit)
        )
        if self.unit >= shape.k:
            engine.state.protection.parity[shard, self.space].records[local, 5] ^= 16
            return
        store = engine.state.hosted[shard, self.space].store
        part = store.weights if self.kind == "row" else store.state[0]
        # the top of a mantissa: rounding does not swallow it
        part.view(torch.uint8).view(part.shape[0], -1)[local, 2] ^= 64


class Ran:
    """The result of a run with flips and faults.

    `events` are those of the rank that reports at the end.
    """

    def __init__(self, workload, flips=(), faults=(), seed=0):
        engines, events = {}, {rank: [] for rank in range(workload.world_size)}
        self.tables, self.reports = [], []

        def on_phase(rank, step, phase):
            for flip in flips:
                if rank in engines:
                    flip(engines[rank], step, phase)

        cluster = SimulatedCluster(
            workload.world_size, seed, faults, on_phase=on_phase, most_calls=100_000
        )

        def program(transport):
            rank = transport.rank
            outcome = run_workload(
                workload,
                transport,
                hooks=_hooks(cluster, rank, events[rank]),
                after_start=lambda engine: engines.update({rank: engine}),
                report=self.tables.append,
            )
            self.reports.append(engines[rank].state.scrub and engines[rank].state.scrub.report)
            return outcome

        outcome = cluster.run(program)
        assert not outcome.unfired
        self.trace = outcome.trace
        assert all(flip.done for flip in flips)
        live = sorted(outcome.results)
        self.told = events[live[0]]
        self.events = [event for event in self.told if event["event"] == "corruption"]
        for rank in live:  # every rank tells the same, so it does not matter who reports
            assert [
                event for event in events[rank] if event["event"] == "corruption"
            ] == self.events
        assert all(report == self.reports[0] for report in self.reports)
        self.report = self.reports[0]
        self.mismatches = sum(outcome.results[rank].verified.mismatches for rank in live[:1])


def _hooks(cluster, rank, events):
    from ecrm.engine.hooks import Hooks

    return Hooks(
        phase=lambda step, name: cluster.enter_phase(rank, step, name), event=noted_in(events)
    )


def _workload(k, m, **changes):
    given = {
        "k": k,
        "m": m,
        "servers": k + m + 1,
        "trainers": 2,
        "spares": 0,
        "scrub_rows_per_step": WHOLE,
        "ids_per_slot": 8,
    }
    return Workload(
        tables=(Table("a", ROWS - 7, 8), Table("b", 7, 8), Table("c", 90, 4)),
        **{**given, **changes},
    )


def _uses(workload, row, first=0, stop=None):
    """Steps from `first` on, below `stop`, that use a row of row space 0."""
    steps = range(first, workload.steps if stop is None else stop)
    return [
        s
        for s in steps
        for slot in range(workload.slots)
        if row in rows_of(workload, s, slot)[0].tolist()
    ]


def _left_alone(workload, unit, step=3):
    """Stripes of row space 0 whose data unit `unit` no step uses from `step` - 2 on.

    Stripes used before that come first.
    """
    quiet = [row for row in range(unit, ROWS, workload.k) if not _uses(workload, row, step - 2)]
    return [row // workload.k for row in sorted(quiet, key=lambda row: not _uses(workload, row))]


# -- telling the wrong unit ------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "m"), [(1, 2), (4, 2), (5, 3), (3, 4), (100, 2), (30, 8)])
def test_any_one_wrong_unit_is_told_with_its_error(k, m):
    rng, code = np.random.default_rng(k), ReedSolomon(k, m)
    data = rng.integers(0, 256, (k, 20), dtype=np.uint8)
    for unit in range(k + m):
        for error in (
            np.eye(1, 20, 7, dtype=np.uint8)[0] * 32,
            rng.integers(0, 256, 20, dtype=np.uint8),
        ):
            units = np.concatenate([data, code.encode(data)])
            units[unit] ^= error
            found = find_wrong_unit(code.coefficients, code.encode(units[:k]) ^ units[k:])
            assert found is not None and found[0] == unit and np.array_equal(found[1], error)


def test_with_one_parity_the_wrong_unit_is_never_told():
    code = ReedSolomon(3, 1)
    assert find_wrong_unit(code.coefficients, np.ones((1, 8), np.uint8)) is None


def test_two_wrong_units_are_not_taken_for_one():
    """Two single bits, in different bytes or with three parities: no one unit explains both."""
    for k, m in ((4, 2), (3, 3)):
        code = ReedSolomon(k, m)
        for a in range(k + m):
            for b in range(a):
                units = np.zeros((k + m, 16), np.uint8)
                units[a, 3], units[b, 9] = 4, 64
                assert (
                    find_wrong_unit(code.coefficients, code.encode(units[:k]) ^ units[k:]) is None
                )


def test_two_wrong_units_in_one_byte_can_look_like_a_third():
    """What docs/guarantees.md warns of: there is such a pair of errors."""
    code = ReedSolomon(3, 2)
    found = set()
    for error in range(1, 256):
        units = np.zeros((5, 16), np.uint8)
        units[0, 3], units[1, 3] = 1, error
        blamed = find_wrong_unit(code.coefficients, code.encode(units[:3]) ^ units[3:])
        found.add(None if blamed is None else blamed[0])
    assert found == {None, 2, 3, 4}


# -- found and put right ---------------------------------------------------------------------------

SHAPES = [
    pytest.param(k, m, layout, marks=[pytest.mark.drill] if layout == "colocated" and k < 3 else [])
    for k, m in ((1, 2), (3, 2), (2, 3))
    for layout in ("dedicated", "colocated")
]


@pytest.mark.parametrize(("k", "m", "layout"), SHAPES)
def test_every_unit_is_put_right_before_anything_uses_it(k, m, layout):
    """The row space was checked before, in step 0.

    A correction may be called `exact` only for rows that no step has used since.
    """
    workload = _workload(k, m, layout=layout)
    truth = truth_of(workload)
    for unit in range(k + m):
        for kind in ("row", "state") if unit < k else ("row",):
            flip = Flip(2, "dense", 0, stripe=3, unit=unit, kind=kind)
            ran = Ran(workload, [flip], seed=unit)
            shape = workload.make_protection().shape
            [event] = ran.events
            assert (event["unit"], event["shard"], event["stripe"]) == (unit, flip.shard(shape), 3)
            assert event["kind"] == (
                "parity" if unit >= k else {"row": "data", "state": "state"}[kind]
            )
            assert event["repaired"] and event["step"] == 3
            exact = unit >= k or not _uses(workload, 3 * k + unit, 1, 3)
            assert event["exact"] == exact
            if unit < k:
                assert (event["table"], event["row"]) == ("a", 3 * k + unit)
            assert ran.tables == [truth.tables] and ran.mismatches == 0
            assert (ran.report.corruptions, ran.report.repaired, ran.report.exact) == (1, 1, exact)


@pytest.mark.parametrize("unit", range(4))
def test_with_one_parity_it_is_reported_once_and_left(unit):
    workload = _workload(3, 1)
    ran = Ran(workload, [Flip(2, "dense", 0, stripe=3, unit=unit)])
    [event] = ran.events
    assert (event["kind"], event["unit"], event["repaired"], event["exact"]) == (
        "unknown",
        None,
        False,
        False,
    )
    assert event["rows"] == [9, 11]
    assert ran.report.passes > 2
    assert (ran.report.corruptions, ran.report.repaired) == (1, 0)


def test_a_stripe_that_rebuilding_has_put_right_is_looked_at_anew():
    """The rank with the wrong shard dies, and the shard is decoded from the others.

    Then the rank that judges the stripe dies. Another bit flips, and another rank judges.
    """
    workload = _workload(3, 1, spares=2, steps=16, rebuild_rows_per_step=WHOLE)
    shape, stripe = workload.make_protection().shape, 3
    wrong, judge = (shape.shard_of_unit(stripe % shape.shards, unit) for unit in (1, 3))
    flips = [Flip(2, "dense", 0, stripe, 1), Flip(13, "dense", 0, stripe, 2)]
    ran = Ran(workload, flips, [PhaseFault(wrong, 5, "update"), PhaseFault(judge, 11, "update")])
    assert [(event["stripe"], event["repaired"]) for event in ran.events] == [
        (stripe, False),
        (stripe, False),
    ]
    assert ran.report.corruptions == 2


def test_two_wrong_stripes_and_one_with_two_wrong_units():
    workload = _workload(3, 2)
    a, b, c = _left_alone(workload, 1)[:3]
    ran = Ran(
        workload,
        [
            Flip(2, "dense", 0, a, 1),
            Flip(2, "dense", 0, b, 4),
            Flip(2, "dense", 0, c, 0),
            Flip(2, "dense", 0, c, 3),
        ],
    )
    told = {
        event["stripe"]: (event["unit"], event["repaired"], event["exact"]) for event in ran.events
    }
    assert told == {a: (1, True, True), b: (4, True, True), c: (None, False, False)}
    assert (ran.report.corruptions, ran.report.repaired, ran.report.exact) == (3, 2, 2)


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("unit", [0, 3, 4])
def test_in_a_shard_that_was_adopted(spares, unit):
    """The shard's first host dies in step 1, and its new host holds the wrong unit.

    All is exact again one round after the rebuilding.
    """
    workload = _workload(
        3, 2, spares=spares, steps=12, rebuild_rows_per_step=WHOLE, optimizer="adagrad"
    )
    stripe = _left_alone(workload, min(unit, 2), step=8)[0]
    victim = workload.make_protection().shape.shard_of_unit(stripe % workload.servers, unit)
    ran = Ran(workload, [Flip(8, "dense", 0, stripe, unit)], [PhaseFault(victim, 1, "parity")])
    assert [(event["unit"], event["repaired"], event["exact"]) for event in ran.events] == [
        (unit, True, True)
    ]
    assert ran.tables == [truth_of(workload).tables] and ran.mismatches == 0


# -- what came of it meanwhile ---------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 8, WHOLE])
@pytest.mark.parametrize("interval", [1, pytest.param(3, marks=pytest.mark.drill)])
def test_a_row_that_no_step_touches_again_gets_its_bits_back(rows, interval):
    workload = _workload(3, 2, scrub_rows_per_step=rows, commit_interval=interval, steps=8)
    truth = truth_of(workload)
    found = [stripe * 3 + unit for unit in range(3) for stripe in _left_alone(workload, unit)]
    assert len(found) > 3
    for row in found[:4]:
        ran = Ran(workload, [Flip(3, "input", 0, row // 3, row % 3)])
        assert [event["repaired"] for event in ran.events] == [True]
        # not checked since its use in step 0: nobody can say
        assert ran.events[0]["exact"] or rows < WHOLE
        assert ran.tables == [truth.tables] and ran.mismatches == 0


@pytest.mark.parametrize("rows", [8, WHOLE])
def test_a_row_used_before_it_is_found_is_said_to_be_inexact(rows):
    """Data and parity agree again, but the wrong bits have already changed the model.

    The event says so.
    """
    workload = _workload(3, 2, steps=8, scrub_rows_per_step=rows)
    row = next(
        row for row in range(ROWS) if _uses(workload, row, 0, 4) and _uses(workload, row, 4, 5)
    )
    # before the values of step 4 are read, which come ahead
    ran = Ran(workload, [Flip(3, "update", 0, row // 3, row % 3)])
    assert [(event["repaired"], event["exact"]) for event in ran.events] == [(True, False)]
    assert ran.mismatches == 0
    assert ran.tables != [truth_of(workload).tables]
    assert (ran.report.repaired, ran.report.exact) == (1, 0)


def test_rows_that_came_ahead_of_a_correction_are_asked_for_anew():
    """The rows of step 3 come ahead, in the redundancy's exchange of step 2."""
    workload = _workload(3, 2, steps=8)
    row = next(row for row in range(ROWS) if {0, 3} <= {*_uses(workload, row, 0, 4)} <= {0, 3})
    ran = Ran(workload, [Flip(2, "update", 0, row // 3, row % 3)])
    assert [(event["step"], event["repaired"], event["exact"]) for event in ran.events] == [
        (3, True, True)
    ]
    assert ran.tables == [truth_of(workload).tables] and ran.mismatches == 0


def test_without_scrubbing_the_flip_ends_in_another_model():
    workload = _workload(3, 2, scrub_rows_per_step=0)
    ran = Ran(workload, [Flip(2, "dense", 0, _left_alone(workload, 1)[0], 1)])
    assert ran.events == [] and ran.report is None
    assert ran.tables != [truth_of(workload).tables]
    assert ran.mismatches > 0


@pytest.mark.parametrize(("k", "m"), [(3, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("rows", [1, 8, WHOLE])
def test_with_nothing_wrong_it_finds_nothing_and_changes_nothing(k, m, rows):
    workload = _workload(k, m, scrub_rows_per_step=rows, steps=8)
    ran = Ran(workload)
    assert ran.events == [] and ran.report.corruptions == 0
    assert ran.tables == [truth_of(workload).tables] and ran.mismatches == 0
    assert ran.report.rows_checked > 0 and ran.report.passes >= 1


def test_one_round_checks_every_record_once():
    workload = _workload(3, 2, scrub_rows_per_step=1, steps=1)
    engines = {}
    cluster = SimulatedCluster(workload.world_size, 0)
    cluster.run(
        lambda t: run_workload(
            workload, t, after_start=lambda engine: engines.update({t.rank: engine})
        )
    )
    scrub = engines[0].state.scrub
    held = sum(h.store.weights.shape[0] for e in engines.values() for h in e.state.hosted.values())
    held += sum(
        p.records.shape[0] for e in engines.values() for p in e.state.protection.parity.values()
    )
    assert scrub.rows_per_pass == held


# -- while ranks die -------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(8))
def test_any_rank_killed_as_scrubbing_begins(rank):
    """With nothing wrong; rank 6 and 7 are trainers."""
    workload = _workload(3, 2, steps=8, rebuild_rows_per_step=WHOLE, scrub_rows_per_step=8)
    ran = Ran(workload, faults=[PhaseFault(rank, 3, "scrub")], seed=rank)
    assert ran.events == []
    assert ran.tables == [truth_of(workload).tables] and ran.mismatches == 0


CALLS = ("scrub", "found something", "tell", "commit")
TRIED = dict(zip(CALLS, (DURING, AFTER, DURING, BEFORE), strict=True))
"""Those of `make test`; `make drill` has all."""
DEATHS = [
    pytest.param(call, when, marks=[] if when is TRIED[call] else pytest.mark.drill)
    for call in CALLS
    for when in (BEFORE, DURING, AFTER)
]


def _number_of(call, workload, flip):
    """Returns the number of the call in which a rank first shares its verdict.

    The run finds the flip and nobody dies; the verdict is the rank's first `share`.
    """
    shares = [
        event for event in Ran(workload, [flip]).trace if (event.rank, event.method) == (0, "share")
    ]
    return shares[0].call_index + CALLS.index(call) - CALLS.index("tell")


@pytest.mark.parametrize(("call", "when"), DEATHS)
def test_a_rank_killed_anywhere_while_a_wrong_unit_is_put_right(call, when):
    """A rank dies that holds the wrong unit, or no unit of its stripe.

    k right units are left to decode from.
    """
    workload = _workload(2, 2, servers=6, steps=12, rebuild_rows_per_step=WHOLE)
    truth, shape, stripe = (
        truth_of(workload),
        workload.make_protection().shape,
        _left_alone(workload, 1)[0],
    )
    members, unit = shape.members(stripe % shape.shards), 1 if CALLS.index(call) % 2 else 3
    number = _number_of(call, workload, Flip(2, "dense", 0, stripe, unit))
    for victim in (
        members[unit],
        *(rank for rank in range(workload.world_size) if rank not in members),
    ):
        fault = Fault(victim, number, when)
        ran = Ran(workload, [Flip(2, "dense", 0, stripe, unit)], [fault], seed=victim)
        # Where the wrong unit died unfound, it was decoded afresh; otherwise it is found, now or
        # after the rebuilding, once.
        assert len(ran.events) == 1 or (victim == members[unit] and not ran.events)
        assert all(event["repaired"] and event["unit"] == unit for event in ran.events)
        assert ran.tables == [truth.tables] and ran.mismatches == 0


@pytest.mark.parametrize("unit", [1, 3])
def test_once_committed_any_rank_may_die(unit):
    workload = _workload(2, 2, servers=6, steps=12, rebuild_rows_per_step=WHOLE)
    truth, stripe = truth_of(workload), _left_alone(workload, 1)[0]
    number = _number_of("commit", workload, Flip(2, "dense", 0, stripe, unit))
    for victim in range(workload.world_size):
        fault = Fault(victim, number, AFTER)
        ran = Ran(workload, [Flip(2, "dense", 0, stripe, unit)], [fault], seed=victim)
        assert [(event["repaired"], event["step"]) for event in ran.events] == [(True, 3)]
        assert ran.tables == [truth.tables] and ran.mismatches == 0


def test_a_death_before_the_wrong_unit_is_found_may_cost_the_row_but_never_hangs():
    """What voids the promise: another unit of the stripe is decoded from the wrong one."""
    workload = _workload(2, 2, servers=6, steps=12, rebuild_rows_per_step=WHOLE)
    shape, stripe = workload.make_protection().shape, _left_alone(workload, 1)[0]
    victim = shape.shard_of_unit(stripe % shape.shards, 0)
    ran = Ran(workload, [Flip(2, "dense", 0, stripe, 1)], [PhaseFault(victim, 2, "scrub")])
    assert not any(event["exact"] for event in ran.events)
    assert ran.mismatches == 0


def test_what_is_laid_out_anew_was_checked_before():
    """With rank 5 dead, stripe members can no longer be kept apart, so all is re-laid.

    Scrubbing goes on over the new stripes.
    """
    workload = _workload(
        4,
        2,
        servers=6,
        trainers=1,
        layout="colocated",
        steps=12,
        rebuild_rows_per_step=WHOLE,
        scrub_rows_per_step=1,
    )
    stripe = _left_alone(workload, 1, step=5)[0]
    early, late = Flip(3, "input", 0, stripe, 1), Flip(9, "input", 0, 5, 4)
    ran = Ran(workload, [early, late], [PhaseFault(5, 1, "parity")])
    assert [event["event"] for event in ran.told if event["event"] in ("corruption", "reshaped")][
        :2
    ] == ["corruption", "reshaped"]
    assert [(event["unit"], event["repaired"]) for event in ran.events] == [(1, True), (4, True)]
    assert ran.tables == [truth_of(workload).tables] and ran.mismatches == 0


def test_a_checked_window_forgets_the_use_of_its_own_rows_only():
    layouts = [SimpleNamespace(periods=4, data_rows_per_shard=8) for _ in range(3)]
    shape, code = StripeShape(3, 2, 1), SimpleNamespace(coefficients=np.ones((1, 2), np.uint8))
    scrub = Scrub(shape, code, SimpleNamespace(layouts=layouts), {}, rows_per_step=3)
    for space in range(3):
        scrub.used(0, space, torch.arange(8))
    scrub._window = _Window(1, torch.arange(1, 3))
    assert scrub.committed() == []
    used = [scrub._used[0, space].nonzero().squeeze(1).tolist() for space in range(3)]
    assert used == [[*range(8)], [0, 1, 6, 7], [*range(8)]]

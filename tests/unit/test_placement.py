"""Closed-form placement and the view's recovery plan, exhaustively where small."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from ecrm.base.errors import Unrecoverable
from ecrm.engine.engine_events import failure_event
from ecrm.engine.failures import RecoveryRecord
from ecrm.placement import view_change
from ecrm.placement.assignment import (
    CannotKeepApart,
    _relieved,
    initial_view,
    plan_reshape,
    spread_shards,
)
from ecrm.placement.stripes import RowLayout, StripeShape
from ecrm.placement.tables import Table, row_spaces
from ecrm.placement.view import View, conflicts, failures_left, keeps_apart, mark_whole
from ecrm.placement.view_change import plan_join, plan_recovery
from ecrm.testing.simulate.promise import Circle, Violation
from ecrm.testing.simulate.role_checks import check_apart, check_spares_first
from support.cpu_time import least_cpu_seconds

SHAPES = [
    (3, 2, 1),
    (4, 3, 1),
    (4, 2, 2),
    (5, 4, 1),
    (6, 4, 2),
    (7, 2, 1),
    (9, 4, 3),
    (3, 1, 0),
    (1, 1, 0),
]


@pytest.mark.parametrize(("shards", "k", "m"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 7, 100, 1000])
def test_every_row_has_one_place_and_comes_back(shards, k, m, rows):
    layout = RowLayout(StripeShape(shards, k, m), rows)
    numbers = torch.arange(rows)
    shard, local = layout.locate(numbers)
    assert len(set(zip(shard.tolist(), local.tolist()))) == rows
    for s in range(shards):
        here = shard == s
        assert torch.equal(layout.rows_of(s, local[here]), numbers[here])
        assert bool((local[here] < layout.data_rows_per_shard).all())
        everything = layout.rows_of(s, torch.arange(layout.data_rows_per_shard))
        assert len(set(everything.tolist())) == layout.data_rows_per_shard
        assert set(everything[everything < rows].tolist()) == set(numbers[here].tolist())


@pytest.mark.parametrize(("shards", "k", "m"), SHAPES)
def test_members_of_a_stripe_are_on_different_shards_and_load_is_even(shards, k, m):
    shape = StripeShape(shards, k, m)
    data, parity = [0] * shards, [0] * shards
    for residue in range(shards):
        members = shape.members(residue)
        assert len(set(members)) == k + m
        for unit, shard in enumerate(members):
            assert shape.residue_of_unit(shard, unit) == residue
            (data if unit < k else parity)[shard] += 1
        for a, b in itertools.combinations(members, 2):
            assert b in shape.sharing_a_stripe(a)
    assert set(data) == {k}
    assert set(parity) == {m}


@pytest.mark.parametrize(("shards", "k", "m"), SHAPES)
def test_units_of_a_row_agree_with_its_location(shards, k, m):
    shape = StripeShape(shards, k, m)
    layout = RowLayout(shape, 500)
    shard, local = layout.locate(torch.arange(500))
    for row in range(0, 500, 13):
        stripe, unit = row // k, row % k
        assert shape.shard_of_unit(stripe % shards, unit) == shard[row]
        assert int(layout.local_of_unit(torch.tensor([stripe]), unit)) == local[row]
        assert int(layout.stripes_of_data(int(shard[row]), local[row : row + 1])) == stripe
        for t in range(m):
            holder = shape.shard_of_unit(stripe % shards, k + t)
            place = layout.local_of_unit(torch.tensor([stripe]), k + t)
            assert int(layout.stripes_of_parity(holder, place)) == stripe
            assert int(place) < layout.parity_rows_per_shard
            assert torch.equal(layout.local_parity(local[row : row + 1] // k, t), place)


def test_shape_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="4\\+1 units do not fit on 4 shards"):
        StripeShape(4, 4, 1)


@pytest.mark.parametrize(("shards", "k", "m"), SHAPES)
def test_recoverable_is_exactly_at_most_m_lost_per_stripe(shards, k, m):
    shape = StripeShape(shards, k, m)
    for count in range(shards + 1):
        for lost in itertools.combinations(range(shards), count):
            worst = max(sum(s in lost for s in shape.members(r)) for r in range(shards))
            if worst <= m:
                shape.check_recoverable(lost)
            else:
                with pytest.raises(Unrecoverable, match="needed units left"):
                    shape.check_recoverable(lost)


SHAPE = StripeShape(4, 3, 1)


def test_tables_of_one_width_form_a_space():
    spaces = row_spaces([Table("a", 10, 8), Table("b", 5, 16), Table("c", 7, 8)])
    assert [(s.dim, s.rows, s.offsets, s.table_numbers) for s in spaces] == [
        (8, 17, (0, 10), (0, 2)),
        (16, 5, (0,), (1,)),
    ]


def test_initial_views_of_both_layouts():
    dedicated = initial_view("dedicated", SHAPE, 2, 1, 4, dense_replicas=2)
    assert dedicated.shards == (0, 1, 2, 3)
    assert dedicated.slots == (4, 5, 4, 5)
    assert dedicated.dense == (4, 5)
    assert dedicated.spares == (6,)
    colocated = initial_view("colocated", SHAPE, 2, 1, 2, dense_replicas=3)
    assert colocated.shards == (0, 1, 2, 3)
    assert colocated.slots == (0, 1)
    assert colocated.dense == (0, 1, 2)
    assert colocated.spares == (4,)
    assert View.from_json(colocated.to_json()) == colocated


def test_a_spare_takes_over_all_roles_servers_first():
    view = initial_view("dedicated", SHAPE, 2, 1, 2, 2)
    after = plan_recovery(view, [4, 1], SHAPE, 2)
    assert after.shards == (0, 6, 2, 3)
    assert after.rebuilding == (1,)
    assert after.slots == (5, 5)
    assert after.dense == (0, 5)
    assert after.epoch == 1


@pytest.mark.parametrize(
    ("spares", "m", "shared"), [(1, 1, [3]), (2, 1, [1, 2]), (3, 1, [1, 2]), (3, 2, [1, 1, 1])]
)
def test_spares_share_the_shards_of_a_server(spares, m, shared):
    """2 m spares at most: the others are not ready for a takeover."""
    shape = StripeShape(24, 2, m)
    view = initial_view("dedicated", shape, 2, spares, 2, 2, shards_per_server=3)
    after = plan_recovery(view, [3], shape, 2)
    heirs = Counter(after.shards[shard] for shard in view.shards_of(3))
    assert sorted(heirs.values()) == shared and set(heirs) <= set(view.spares)
    assert keeps_apart(after, shape) and after.rebuilding == view.shards_of(3)
    assert len(after.spares) == spares - len(shared)


def test_a_spare_next_to_a_stripe_member_shares_nothing():
    """Of two spares, one is on the host of a server with units of the same stripes."""
    shape = StripeShape(24, 2, 1)
    view = initial_view("dedicated", shape, 1, 2, 1, 2, shards_per_server=3)
    domains = list(view.domains)
    domains[view.spares[1]] = domains[4]
    after = plan_recovery(replace(view, domains=tuple(domains)), [3], shape, 2)
    assert {after.shards[shard] for shard in view.shards_of(3)} == {view.spares[0]}


def test_several_dead_servers_are_shared_evenly():
    shape = StripeShape(30, 2, 2)
    view = initial_view("dedicated", shape, 1, 4, 1, 3, shards_per_server=3)
    after = plan_recovery(view, [1, 6], shape, 3)
    heirs = Counter(after.shards[s] for s in (*view.shards_of(1), *view.shards_of(6)))
    assert sorted(heirs.values()) == [1, 1, 2, 2] and keeps_apart(after, shape)


def test_without_spares_an_idle_survivor_adopts_before_stripes_are_put_together():
    view = initial_view("dedicated", SHAPE, 2, 0, 2, 2)
    after = plan_recovery(view, [2], SHAPE, 2)
    assert after.shards == (0, 1, 4, 3)
    again = plan_recovery(mark_whole(after, [2]), [0], SHAPE, 2)
    assert again.shards == (5, 1, 4, 3)
    crowded = plan_recovery(mark_whole(again, [0]), [1], SHAPE, 2)
    assert crowded.shards[1] in (3, 4, 5)
    assert failures_left(mark_whole(crowded, [1]), SHAPE) == 0


def test_more_than_m_in_a_stripe_is_refused_with_names():
    view = initial_view("dedicated", SHAPE, 2, 0, 2, 2)
    with pytest.raises(
        Unrecoverable, match="ranks 0, 1 died.*erasure k=3 m=1.*2 of 3 needed units left"
    ):
        plan_recovery(view, [0, 1], SHAPE, 2, "erasure k=3 m=1")
    with pytest.raises(Unrecoverable, match="every replica of the dense model is lost"):
        plan_recovery(view, [4, 5], SHAPE, 2)


def test_a_loss_during_rebuilding_counts():
    view = plan_recovery(initial_view("dedicated", SHAPE, 2, 2, 2, 2), [0], SHAPE, 2)
    assert failures_left(view, SHAPE) == 0
    with pytest.raises(Unrecoverable):
        plan_recovery(view, [1], SHAPE, 2)
    assert failures_left(mark_whole(view, [0]), SHAPE) == 1


@pytest.mark.parametrize(("servers", "k", "m"), [(4, 2, 1), (5, 2, 2), (6, 4, 2), (7, 2, 1)])
@pytest.mark.parametrize("layout", ["dedicated", "colocated"])
def test_failures_left_is_true_for_every_choice_of_ranks(servers, k, m, layout):
    shape = StripeShape(servers, k, m)
    view = initial_view(layout, shape, 2, 1, 2, m + 1)
    for first in view.live:
        after = plan_recovery(view, [first], shape, m + 1)
        left = failures_left(after, shape)

        def survives(dead, after=after):
            try:
                plan_recovery(after, dead, shape, m + 1)
            except Unrecoverable:
                return False
            return True

        assert all(survives(dead) for dead in itertools.combinations(after.live, left))
        assert not all(survives(dead) for dead in itertools.combinations(after.live, left + 1))


@pytest.mark.parametrize("layout", ["dedicated", "colocated"])
def test_every_plan_keeps_roles_on_live_ranks(layout):
    shape = StripeShape(6, 4, 2)
    view = initial_view(layout, shape, 3, 1, 3, 3)
    for dead in itertools.combinations(view.live, 2):
        after = plan_recovery(view, dead, shape, 3)
        assert set(after.shards) | set(after.slots) | set(after.dense) <= set(after.live)
        assert set(after.slots) <= set(after.dense)
        assert len(after.dense) >= 3
        for slot, host in enumerate(view.slots):
            assert host in dead or after.slots[slot] == host
        for shard, host in enumerate(view.shards):
            assert host in dead or after.shards[shard] == host


def _recoveries(seed: int):
    """Yields (view before, view after, circle, may_move) for the deaths of a random run.

    `may_move` says whether shards that are being rebuilt may move.
    """
    draw = random.Random(seed)
    k, m = draw.randint(1, 5), draw.randint(1, 3)
    shape = StripeShape(k + m + draw.randint(0, 6), k, m)
    layout, trainers, spares = (
        draw.choice(("dedicated", "colocated")),
        draw.randint(1, 5),
        draw.choice((0, 0, 1, 2)),
    )
    world = (
        shape.shards + trainers if layout == "dedicated" else max(shape.shards, trainers)
    ) + spares
    hosts = draw.randint(2, world)
    domains = [draw.randrange(hosts) for _ in range(world)] if draw.random() < 0.4 else None
    try:
        view = initial_view(layout, shape, trainers, spares, 2 * trainers, m + 1, domains)
    except CannotKeepApart:
        return
    for _ in range(10):
        dead = draw.sample(view.live, min(draw.choice((1, 1, 1, 2, 2, 3)), len(view.live) - 1))
        may_move = draw.random() < 0.8
        try:
            after = plan_recovery(view, dead, shape, m + 1, may_move=may_move)
        except Unrecoverable:
            if not view.rebuilding:
                return
            view = mark_whole(view, view.rebuilding)
            continue
        yield view, after, Circle.of(shape), may_move
        view = mark_whole(after, after.rebuilding) if draw.random() < 0.6 else after


def test_shards_of_dead_ranks_are_kept_apart_where_that_can_be():
    """Dead ranks' shards are kept apart, whatever was lost before.

    The checkers try every placement to find out whether that is possible.
    """
    judged = 0
    for seed in range(400):
        for before, after, circle, may_move in _recoveries(seed):
            check_apart(before, after, circle, may_move)
            check_spares_first(before, after, circle)
            moved = {
                shard
                for shard, host in enumerate(before.shards)
                if after.shards[shard] != host and host in after.live
            }
            assert moved <= (set(before.rebuilding) if may_move else set())
            judged += 1
    assert judged > 1000


def test_a_busy_rank_that_gets_roles_while_a_spare_waits_is_found():
    """A rank that has handed on its only shard is not busy."""
    shape = StripeShape(3, 2, 1)
    before = replace(initial_view("dedicated", shape, 2, 2, 2, 2), rebuilding=(2,))
    # servers 0 to 2, trainers 3 and 4, spares 5 and 6; trainer 3 dies
    live = tuple(rank for rank in before.live if rank != 3)
    slots = tuple(2 if rank == 3 else rank for rank in before.slots)
    after = replace(before, epoch=before.epoch + 1, live=live, slots=slots)
    with pytest.raises(Violation, match=r"ranks \[2\] got roles of rank 3 while spare"):
        check_spares_first(before, after, Circle.of(shape))
    check_spares_first(before, replace(after, shards=(0, 1, 6)), Circle.of(shape))


def test_shards_that_find_hosts_one_by_one_are_not(monkeypatch):
    monkeypatch.setattr(view_change, "least_conflicts", lambda view, movable, shape: view.shards)
    with pytest.raises(Violation, match="share a failure domain, though"):
        for seed in range(400):
            for before, after, circle, may_move in _recoveries(seed):
                check_apart(before, after, circle, may_move)


def test_a_failure_says_which_shard_is_rebuilt_elsewhere_from_the_start():
    """From survivable seed 5601: shards 3 and 4, still being rebuilt, make room for shard 7.

    After that, shard 7 shares its rank with none of its stripes' other shards.
    """
    shape = StripeShape(8, 1, 3)
    before = View(
        3,
        (0, 1, 5, 6, 7, 8),
        (0, 1, 6, 5, 8, 5, 6, 7),
        (0, 1, 0, 0, 1, 1),
        (0, 1, 5, 7),
        rebuilding=(2, 3, 4),
        domains=tuple(range(9)),
    )
    after = plan_recovery(before, [7], shape, 4)
    assert (
        after.shards == (0, 1, 6, 8, 0, 5, 6, 8)
        and keeps_apart(after, shape)
        and after.rebuilding == (2, 3, 4, 7)
    )
    failure = RecoveryRecord((7,), 4, "lookup", 1, 0.0, 0.1, shards=(7,), slots=(), rebuilt_bytes=0)
    event = failure_event(failure, before, after, 3, 0, 3)
    assert event.shards == {7: 8} and event.moved == {3: 8, 4: 0}
    assert plan_recovery(before, [7], shape, 4, may_move=False).shards[2:5] == before.shards[2:5]


def test_two_shards_that_want_the_same_rank_are_both_placed():
    """Copies lie on the next two of seven ranks.

    Shard 0 would take a rank because it has no slot, but that rank is the only one for shard 1.
    """
    shape = StripeShape(7, 1, 2)
    view = initial_view("colocated", shape, 4, 0, 4, 3)
    view = mark_whole(plan_recovery(view, [2], shape, 3), [2])
    assert view.shards == (0, 1, 5, 3, 4, 5, 6)
    after = plan_recovery(view, [0, 1], shape, 3)
    assert after.shards == (3, 4, 5, 3, 4, 5, 6) and keeps_apart(after, shape)


@pytest.mark.parametrize("hosts", range(1, 9))
@pytest.mark.parametrize(
    ("shards", "width"), [(3, 3), (4, 3), (6, 3), (7, 3), (8, 4), (9, 3), (11, 4), (12, 3)]
)
def test_shards_are_spread_over_hosts_wherever_that_is_possible(shards, width, hosts):
    shape = StripeShape(shards, width - 1, 1)
    ranks = range(shards * hosts)
    domains = [rank % hosts for rank in ranks]
    possible = hosts >= shards or hosts >= -(-shards // (shards // width))
    if not possible:
        with pytest.raises(
            CannotKeepApart, match=rf"needs? at least \d+ failure domains, there are {hosts}"
        ):
            spread_shards(shape, ranks, domains)
        return
    placed = spread_shards(shape, ranks, domains)
    assert len(set(placed)) == shards
    for a, b in itertools.combinations(range(shards), 2):
        assert not (b in shape.sharing_a_stripe(a) and domains[placed[a]] == domains[placed[b]])
    load = [sum(domains[rank] == host for rank in placed) for host in range(hosts)]
    assert max(load) == -(-shards // hosts)


def test_too_few_ranks_on_a_host_is_said():
    with pytest.raises(
        CannotKeepApart,
        match="6 shards over 3 failure domains: 2 ranks are needed in each of the first 3",
    ):
        spread_shards(StripeShape(6, 2, 1), range(6), [0, 0, 0, 1, 1, 2])


@pytest.mark.parametrize("layout", ["dedicated", "colocated"])
def test_a_host_holds_one_unit_of_a_stripe_and_one_dense_replica_counts(layout):
    shape = StripeShape(6, 2, 1)
    domains = [rank // 3 for rank in range(12)]
    view = initial_view(layout, shape, 2, 4 if layout == "dedicated" else 6, 2, 2, domains)
    assert keeps_apart(view, shape)
    assert len({domains[rank] for rank in view.dense}) >= 2
    assert failures_left(view, shape) == 1
    for host in range(4):
        after = plan_recovery(view, [rank for rank in view.live if domains[rank] == host], shape, 2)
        whole = mark_whole(after, after.rebuilding)
        assert keeps_apart(whole, shape), (host, whole)
        assert len({domains[rank] for rank in whole.dense}) >= 2
        assert failures_left(whole, shape) == 1


def test_a_spare_beside_a_stripe_member_is_not_the_heir():
    shape = StripeShape(3, 2, 1)
    view = initial_view("dedicated", shape, 1, 2, 1, 2, domains=[0, 1, 2, 3, 1, 0])
    assert view.spares == (4, 5)
    after = plan_recovery(view, [0], shape, 2)
    assert after.shards[0] == 5
    assert conflicts(0, 4, after, shape) == 1


def test_reshape_keeps_m_with_the_largest_k_until_too_few_are_left():
    shape = StripeShape(8, 6, 2)
    view = initial_view("colocated", shape, 2, 0, 2, 3)
    first = view, shape
    assert plan_reshape(view, shape, *first) is None
    seen = []
    while True:
        lost = sorted(set(view.shards))[:2]
        view = plan_recovery(view, lost, shape, 3)
        view = mark_whole(view, view.rebuilding)
        plan = plan_reshape(view, shape, *first)
        if plan is None:
            break
        shape, view = plan
        seen.append((shape.shards, shape.k, shape.m))
        assert keeps_apart(view, shape) and failures_left(view, shape) == 2
        assert set(view.shards) == set(view.live)
    assert seen == [(6, 4, 2), (4, 2, 2)]
    assert len(view.live) == 2


def test_reshape_over_hosts_takes_fewer_shards_where_hosts_are_few():
    shape = StripeShape(8, 2, 2)
    domains = [rank // 2 for rank in range(8)]
    first = view = initial_view("colocated", shape, 2, 0, 2, 3, domains)
    view = plan_recovery(view, [0, 1], shape, 3)
    view = mark_whole(view, view.rebuilding)
    assert not keeps_apart(view, shape)
    assert (
        plan_reshape(view, shape, first, shape) is None
    )  # three hosts cannot hold 2 + 2 units apart
    shape = StripeShape(10, 3, 1)
    domains = [rank // 2 for rank in range(10)]
    first = view = initial_view("colocated", shape, 2, 0, 2, 2, domains)
    view = plan_recovery(view, [0, 1], shape, 2)
    view = mark_whole(view, view.rebuilding)
    fewer, after = plan_reshape(view, shape, first, shape)
    assert (fewer.k, fewer.m) == (3, 1) and fewer.shards == 8
    assert keeps_apart(after, fewer)


def test_the_loss_of_a_host_of_72_ranks_out_of_14_is_planned_at_once():
    """0.05 s of CPU; a search that looks at all ranks for each shard took 7 s."""
    shape = StripeShape(14 * 72, 10, 2)
    domains = [rank % 14 for rank in range(shape.shards)]
    view = initial_view("colocated", shape, shape.shards, 0, shape.shards, 3, domains)
    lost = [rank for rank in view.live if domains[rank] == 3]
    assert least_cpu_seconds(lambda: plan_recovery(view, lost, shape, 3)) < 0.5
    after = plan_recovery(view, lost, shape, 3)
    assert not set(after.shards) & set(lost) and not set(after.slots) & set(lost)
    assert failures_left(after, shape) == 1
    assert max(Counter(after.shards).values()) == 2


@pytest.mark.parametrize(("slots", "moved"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_a_rank_that_joins_takes_the_higher_half_of_the_slots_of_another(slots, moved):
    first = View(0, (0, 1, 2), (0,), tuple(1 + slot % 2 for slot in range(slots)), (1, 2))
    first = replace(first, domains=(0, 1, 2), slots=(1, 2) if slots == 1 else first.slots)
    view = replace(first, live=(0, 1), slots=(1,) * slots, dense=(1,))
    assert plan_join(view, [2], first, 2).slots == (1,) * (slots - moved) + (2,) * moved


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([3], "row 3 of table a"),
        ([5, 3], "2 rows of table a, row 3 first"),
        ([10, 3, 15], "row 3 of table a, and rows of 2 more tables"),
    ],
)
def test_rows_of_a_space_are_told_as_rows_of_tables(rows, words):
    [space] = row_spaces([Table("a", 9, 4), Table("b", 5, 4), Table("c", 5, 4)])
    assert space.in_words(rows) == words


def test_a_doubled_up_shard_moves_to_a_rank_without_a_shard_and_no_other_shard_moves():
    shape = StripeShape(4, 2, 1)
    view = View(3, (0, 1, 2, 3), (0, 1, 1, 2), (0,), (0,), domains=(0, 1, 2, 3))
    _, moved = _relieved(view, shape, [3])
    assert sorted(moved.shards) == [0, 1, 2, 3] and moved.epoch == 4
    assert sum(old != new for old, new in zip(view.shards, moved.shards, strict=True)) == 1
    assert _relieved(moved, shape, [3]) is None

"""How ranks share the cores: each keeps to one core, or all sleep while they wait."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ecrm.placement.view import View
from ecrm.process.cores import BIND, POLL, SLEEP, Cores, best_manner, deal

VIEW = View(
    0,
    live=tuple(range(8)),
    shards=(0, 1, 2, 3, 4),
    slots=(5, 6, 5),
    dense=(5, 6),
    domains=tuple(range(8)),
)


def test_ranks_of_each_role_are_dealt_to_the_cores_in_turn():
    assert deal(VIEW, range(8), [0, 1]) == {5: 0, 6: 1, 0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 7: 1}
    taken_over = replace(VIEW, live=(0, 2, 3, 4, 5, 6, 7), shards=(0, 7, 2, 3, 4))
    assert deal(taken_over, range(8), [0, 1]) == {5: 0, 6: 1, 0: 0, 2: 1, 3: 0, 4: 1, 7: 0}
    assert deal(VIEW, [1, 4, 6, 7], [3, 9, 11]) == {6: 3, 1: 9, 4: 11, 7: 3}


def test_a_rank_with_more_slots_or_shards_shares_its_core_with_fewer_ranks():
    colocated = View(
        0,
        (0, 1, 2, 3),
        shards=(0, 1, 2, 0, 3),
        slots=(0, 1, 2, 1),
        dense=(0, 1),
        domains=tuple(range(4)),
    )
    assert deal(colocated, range(4), [0, 1]) == {1: 0, 0: 1, 2: 1, 3: 0}
    dedicated = replace(
        colocated, live=(0, 1, 2, 3, 4), shards=(2, 3, 4, 4), slots=(0, 1), domains=tuple(range(5))
    )
    assert deal(dedicated, range(5), [0, 1]) == {0: 0, 1: 1, 4: 0, 2: 1, 3: 1}


@pytest.mark.parametrize(
    "slots, cores, manner",
    [
        ((0, 1), 2, BIND),
        ((0, 1, 2), 2, SLEEP),
        ((0, 1, 2, 3), 2, BIND),
        ((0, 1, 2, 3), 3, SLEEP),
        ((0, 1, 2, 0), 2, BIND),
        ((0, 1, 2, 3, 0), 2, SLEEP),
        ((0, 0, 1), 2, BIND),  # each has a core for itself
        ((0, 0), 2, BIND),
        ((6, 7), 2, BIND),  # on other hosts
    ],
)
def test_ranks_sleep_where_cores_would_get_unequal_slots(
    slots: tuple[int, ...], cores: int, manner: str
):
    view = View(0, tuple(range(8)), (0, 1, 2, 3, 4), slots, (0,), domains=tuple(range(8)))
    mine = range(5)
    assert best_manner(view, deal(view, mine, range(cores)), range(cores)) == manner


@pytest.fixture
def free():
    cores = os.sched_getaffinity(0)
    yield cores
    os.sched_setaffinity(0, cores)


def ranks(*live: int, slots: tuple[int, ...] = (2,)) -> View:
    return View(0, live, (0, 1), slots, (2,), domains=tuple(range(999)))


def test_a_rank_keeps_to_its_core_as_long_as_ranks_outnumber_cores(free: set[int]):
    cores = Cores(transport := SimpleNamespace(rank=1), range(999))
    cores.apply_view(ranks(*range(999)))
    assert os.sched_getaffinity(0) == {sorted(free)[2 % len(free)]} and cores.manner == BIND
    cores.apply_view(ranks(*range(len(free) + 1)))
    assert len(os.sched_getaffinity(0)) == 1 and cores.manner == BIND and not transport.sleeps
    cores.apply_view(ranks(*range(len(free))))
    assert os.sched_getaffinity(0) == free and cores.manner is None and not transport.sleeps


def test_a_rank_moves_and_sleeps_where_slots_are_one_more_than_cores_or_where_it_is_told_to(
    free: set[int],
):
    uneven = ranks(*range(999), slots=tuple(range(len(free) + 1)))
    cores = Cores(transport := SimpleNamespace(rank=1), range(999))
    cores.apply_view(uneven)
    if len(free) > 1:
        assert cores.manner == SLEEP and transport.sleeps and os.sched_getaffinity(0) == free
    for wish, sleeps, bound in (SLEEP, True, False), (POLL, False, False), (BIND, False, True):
        cores = Cores(transport, range(999), wish)
        cores.apply_view(uneven)
        assert (cores.manner, transport.sleeps) == (wish, sleeps)
        assert len(os.sched_getaffinity(0)) == (1 if bound else len(free))
        cores.apply_view(ranks(*range(len(free))))
        assert cores.manner is None and not transport.sleeps and os.sched_getaffinity(0) == free

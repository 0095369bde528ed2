"""The ways of messages between hosts: who gathers, and messages joined in one."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from ecrm.transport.by_host import FarHost, Routes, joined, parted, routes


def test_the_routes_of_two_hosts_meet() -> None:
    host_of = {0: "a", 1: "b", 2: "c", 3: "a", 4: "b", 5: "c"}
    of_3 = routes(3, range(6), host_of, 2)
    assert of_3 == Routes((0, 3), (0,), (FarHost((1, 4), 3, 1), FarHost((2, 5), 0, 2)))
    assert routes(3, range(6), host_of, 3) == Routes((0, 3), (0, 1, 2, 4, 5), ())
    assert routes(3, (1, 3), host_of, 1) == Routes((3,), (), (FarHost((1,), 3, 1),))


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_have_the_same_gatherers_and_each_message_one_way(seed: int) -> None:
    draw = Random(seed)
    host_of = {rank: draw.randrange(5) for rank in range(40)}
    live = sorted(draw.sample(range(40), draw.randrange(2, 41)))
    all_routes = {rank: routes(rank, live, host_of, draw.randrange(1, 2)) for rank in live}
    pairs: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for rank, its in all_routes.items():
        reached = [rank, *its.direct, *(each for far in its.far for each in far.ranks)]
        assert sorted(reached) == live
        assert set(its.here) == {each for each in live if host_of[each] == host_of[rank]}
        for far in its.far:
            assert far.gatherer in its.here and far.theirs in far.ranks
            hosts = host_of[rank], host_of[far.theirs]
            pairs.setdefault(hosts, set()).add((far.gatherer, far.theirs))
    for (one, other), found in pairs.items():
        ((gatherer, theirs),) = found
        assert pairs[other, one] == {(theirs, gatherer)}


def test_a_host_with_few_ranks_gathers_for_nobody() -> None:
    host_of = {0: "a", 1: "a", 2: "b", 3: "c", 4: "c"}
    of_0 = routes(0, range(5), host_of, 2)
    assert of_0.direct == (1, 2) and [far.ranks for far in of_0.far] == [(3, 4)]


def test_the_work_of_a_host_is_spread_over_its_ranks() -> None:
    host_of = {rank: rank % 5 for rank in range(20)}
    gatherers = [far.gatherer for far in routes(0, range(20), host_of, 1).far]
    assert len(set(gatherers)) == 4


@pytest.mark.parametrize("sizes", [[], [0], [1], [8, 0, 3], [7, 16, 100, 0]])
def test_joined_messages_are_parted_again_and_begin_at_words(sizes: list[int]) -> None:
    draw = np.random.default_rng(1)
    messages = [draw.integers(0, 256, size, np.uint8) for size in sizes]
    whole = joined(77, messages)
    assert whole[:8].view(np.int64)[0] == 77 and len(whole) % 8 == 0
    came = parted(whole, len(sizes))
    for message, back in zip(messages, came, strict=True):
        assert np.array_equal(message, back)
        assert not len(back) or (back.ctypes.data - whole.ctypes.data) % 8 == 0

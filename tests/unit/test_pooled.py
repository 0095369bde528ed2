"""Which bags a slot asks a shard to sum, and what the shard makes of them."""

import pytest
import torch

from ecrm.placement.stripes import RowLayout, StripeShape
from ecrm.placement.table_places import SPREAD, TablePlaces
from ecrm.protection.pooled import ShardBags, SlotBags, asked_bags, bits_of, number_of

ROWS, HOMES = (20, 30, 10, 8), (1, 0, 1, SPREAD)
FIRSTS = (0, 20, 50, 60)
LAYOUT = RowLayout(StripeShape(2, 1, 0), sum(ROWS), TablePlaces(ROWS, HOMES, 2))


def bags_of(*features):
    """Unique rows and bags of features, each a table and the ids of its bags."""
    ids = [FIRSTS[table] + row for table, bags in features for bag in bags for row in bag]
    wanted, places = torch.tensor(ids).unique(return_inverse=True)
    bags = SlotBags(
        [table for table, _ in features],
        [len(bags) for _, bags in features],
        [sum(map(len, bags)) for _, bags in features],
        torch.tensor([len(bag) for _, bags in features for bag in bags]),
        places,
    )
    return wanted, bags


def asked(features, dim=64, pools=lambda shard: True):
    wanted, bags = bags_of(*features)
    counts, places, _ = LAYOUT.split(wanted)
    parts = [(shard, part) for shard, part in enumerate(places.split(counts)) if part.numel()]
    return wanted, dict(parts), asked_bags(LAYOUT, wanted, bags, parts, dim, pools)


MANY = [list(range(8)), [], [3, 9, 3, 11]]
"""Bags of one table: 10 rows in 3 bags."""
FEW = [[1], [2, 1], [1]]
"""2 rows in 3 bags."""


def test_a_table_is_summed_where_that_takes_fewer_bytes():
    wanted, parts, found = asked([(0, MANY), (1, MANY), (2, FEW), (3, MANY)])
    assert found.keys() == {0, 1}, "both shards have a table worth summing"
    assert found[0].bags.tolist() == [3, 4, 5] and found[1].bags.tolist() == [0, 1, 2]
    # a table of few rows, and a spread table, travel by rows
    alone = wanted[parts[1][found[1].rest]].tolist()
    assert [row for row in alone if row < 60] == [51, 52]
    assert [row for row in alone if row >= 60] and all(row >= 50 for row in alone)
    assert asked([(2, FEW)])[2] == {}
    assert asked([(0, MANY)], dim=4)[2].keys() == {1} and asked([(0, [[1, 2]] * 9)])[2] == {}


def test_a_shard_whose_memory_is_at_hand_is_asked_for_rows():
    assert asked([(0, MANY), (1, MANY)], pools=lambda shard: shard == 0)[2].keys() == {0}
    assert asked([(0, MANY), (1, MANY)], pools=lambda shard: False)[2] == {}


@pytest.mark.parametrize("features", [[(0, MANY)], [(2, FEW), (0, MANY), (3, FEW), (0, MANY[:1])]])
def test_sums_and_gradients_are_those_of_the_slot(features):
    wanted, parts, found = asked(features)
    place, bags = parts[1], found[1]
    values = torch.randn(wanted.numel(), 64, generator=torch.Generator().manual_seed(0))
    shard = ShardBags.of(bags.words, bags.bags.numel(), place.numel())
    assert torch.equal(shard.rest, bags.rest)
    ids = [[FIRSTS[table] + row for row in bag] for table, of_table in features for bag in of_table]
    numbers = {int(row): number for number, row in enumerate(wanted)}
    sums = shard.pooled(values, place)
    for number, found_sum in zip(bags.bags.tolist(), sums):
        expected = torch.zeros(64)
        for row in ids[number]:
            expected += values[numbers[row]]
        assert torch.equal(found_sum, expected)
    gradients = torch.randn(bags.bags.numel(), 64, generator=torch.Generator().manual_seed(1))
    of_rows = shard.gradients(gradients.view(-1), 3.0, torch.device("cpu"))
    for where, found_gradient in zip(shard.summed.tolist(), of_rows):
        expected = torch.zeros(64)
        for number, gradient in zip(bags.bags.tolist(), gradients):
            for row in ids[number]:
                if row == int(wanted[place[where]]):
                    expected += gradient
        assert torch.equal(found_gradient, expected / 3.0)


def test_a_divisor_travels_whole():
    for number in (1.0, 3.0, 65536.0, 1 / 3, 1e-300):
        assert number_of(bits_of(number)) == number

"""Whole tables on shards: every row has one place, and shards are even."""

from dataclasses import replace

import pytest
import torch

from ecrm.placement.stripes import StripeShape, row_layouts
from ecrm.placement.table_places import SPREAD, TablePlaces, _homes, place_tables
from ecrm.placement.tables import MOST_ROWS, Table, row_spaces

SHAPES = [(3, 2, 1), (5, 4, 1), (6, 4, 2), (4, 1, 0), (1, 1, 0)]
KAGGLE = [
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27),
    *(14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
]
"""Rows of the tables of Criteo's Kaggle set, without the rare categories left out."""


def spaces_of(*rows, dims=(8,)):
    tables = [Table(f"t{n}", count, dims[n % len(dims)]) for n, count in enumerate(rows)]
    return row_spaces(tables)


@pytest.mark.parametrize(("shards", "k", "m"), SHAPES)
@pytest.mark.parametrize(
    "rows", [(), (1,), (7, 3), (100, 5, 5, 5, 5), (40, 40, 40, 40, 40, 40, 40), (1, 90, 17, 3, 40)]
)
def test_every_row_has_one_place_and_comes_back(shards, k, m, rows):
    for layout, space in zip(
        row_layouts(spaces_of(*rows, dims=(8, 4)), StripeShape(shards, k, m), True),
        spaces_of(*rows, dims=(8, 4)),
    ):
        numbers = torch.arange(space.rows)
        shard, local = layout.locate(numbers)
        assert len(set(zip(shard.tolist(), local.tolist()))) == space.rows
        counts, places, split = layout.split(numbers)
        assert places.tolist() == shard.argsort(stable=True).tolist()
        assert torch.equal(split, local[places]) and len(counts) == shards
        turned = layout.split(numbers.flip(0))
        assert (
            turned[0] == counts
            and turned[1].tolist() == shard.flip(0).argsort(stable=True).tolist()
        )
        assert torch.equal(turned[2], local.flip(0)[turned[1]])
        some = numbers[::3]
        assert torch.equal(layout.split(some)[1], shard[::3].argsort(stable=True))
        for s in range(shards):
            here = shard == s
            assert counts[s] == int(here.sum())
            assert torch.equal(layout.rows_of(s, local[here]), numbers[here])
            everything = layout.rows_of(s, torch.arange(layout.data_rows_per_shard))
            assert len(set(everything.tolist())) == layout.data_rows_per_shard
            assert set(everything[everything < space.rows].tolist()) == set(numbers[here].tolist())


def test_a_whole_table_lies_on_its_shard_and_a_spread_one_on_all():
    places = TablePlaces((4, 10, 3), (1, SPREAD, 0), shards=2)
    shard, local = places.locate(torch.arange(17))
    assert shard[:4].tolist() == [1] * 4 and local[:4].tolist() == [0, 1, 2, 3]
    assert shard[4:14].tolist() == [1, 0] * 5
    assert local[4:14].tolist() == [4 + row // 2 for row in range(10)]
    assert shard[14:].tolist() == [0] * 3 and places.rows_per_shard == 9


@pytest.mark.parametrize("shards", [3, 5, 8, 16])
@pytest.mark.parametrize(
    "rows",
    [KAGGLE, [200_000] * 26, [int(1e7 / (n + 1) ** 1.2) for n in range(26)], [50, 1, 1]],
    ids=["kaggle", "equal", "skewed", "few"],
)
def test_shards_are_even_by_rows_and_by_tables(shards, rows):
    spaces = spaces_of(*rows)
    (places,) = place_tables(spaces, shards)
    rounding = 1 + places.homes.count(SPREAD)
    assert places.rows_per_shard <= MOST_ROWS * sum(rows) / shards + rounding
    whole = [home for home in places.homes if home != SPREAD]
    most = max((whole.count(shard) for shard in range(shards)), default=0)
    assert most <= 2 * len(rows) / shards + 1
    # the largest table of Criteo is spread, and most of the small tables stay whole
    if rows is KAGGLE:
        assert places.homes[2] == SPREAD and len(whole) >= 20


def fullest(spaces, places, shards):
    """Rows and lookups of the fullest shard, as shares of an even shard."""
    tables = [table for space in spaces for table in space.tables]
    held = [0.0] * shards
    for space, of_space in zip(spaces, places):
        for table, home in zip(space.tables, of_space.homes):
            for shard in range(shards) if home == SPREAD else [home]:
                held[shard] += table.lookups / (shards if home == SPREAD else 1)
    rows = max(each.rows_per_shard for each in places) * shards / sum(t.rows for t in tables)
    return rows, max(held) * shards / sum(table.lookups for table in tables)


# ids of a bag by table, as MLPerf's DLRMv2 expands Criteo's features
BAGS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]


@pytest.mark.parametrize("shards", [2, 3, 5])
@pytest.mark.parametrize("name", ["kaggle", "equal", "skewed"])
def test_known_lookups_are_even_where_no_table_has_more_than_a_share(shards, name):
    rows = {"kaggle": KAGGLE, "equal": [200_000] * 26}.get(
        name, [int(1e7 / (n + 1) ** 1.2) for n in range(26)]
    )
    bags = BAGS if name == "kaggle" else [1 + 3 * (n * 7 % 26) for n in range(26)]
    blind = spaces_of(*rows)
    known = row_spaces(
        [replace(table, lookups=float(bags[n])) for n, table in enumerate(blind[0].tables)]
    )
    places = place_tables(known, shards)
    of_rows, of_lookups = fullest(known, places, shards)
    assert of_rows <= MOST_ROWS * 1.01
    # no table is spread for its lookups: the largest bag may be more than a share by itself
    whole = [bag for bag, home in zip(bags, places[0].homes) if home != SPREAD]
    assert of_lookups <= max(1.2, 1.02 * max(whole) * shards / sum(bags))
    unknown = fullest(known, place_tables(blind, shards), shards)[1]
    assert of_lookups <= max(1.1, unknown)
    if (name, shards) == ("kaggle", 2):
        assert of_lookups < 1.05 and unknown > 1.6
    assert [each.homes for each in place_tables(known, shards)] == [each.homes for each in places]


def test_the_places_of_tables_do_not_depend_on_k_and_m():
    spaces = spaces_of(*KAGGLE)
    one, other = (row_layouts(spaces, StripeShape(5, k, m), True)[0] for k, m in ((4, 1), (1, 0)))
    assert one.places.homes == other.places.homes


def test_padding_of_more_shards_than_rows_a_shard_has_numbers_of_its_own():
    places = TablePlaces((2,), (0,), shards=4)
    local = torch.arange(places.rows_per_shard)
    numbers = [number for shard in range(4) for number in places.rows_of(shard, local).tolist()]
    assert sorted(numbers)[:2] == [0, 1] and len(set(numbers)) == len(numbers) == 8


def test_tables_go_where_rows_and_lookups_are_fewest():
    homes, filled, held = _homes([5] * 4, [0.0] * 4, (), [0.2, 0.0], shards=2)
    assert (homes, filled, held) == ([0, 1, 0, 1], [10.0, 10.0], [0.2, 0.0])

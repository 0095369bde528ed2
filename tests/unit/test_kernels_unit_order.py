"""unit_order: the C++ against the reference and the definition."""

from __future__ import annotations

import pytest
import torch

from ecrm.kernels.unit_order import (
    split_by_shard,
    split_by_unit,
    unique_by_unit,
    unique_with_uses,
)
from ecrm.placement.stripes import RowLayout, StripeShape

BACKENDS = ("reference", "cpu")


def _rows(n: int, most: int, seed: int) -> torch.Tensor:
    return torch.randint(0, most, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("units", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("n", "most"), [(0, 1), (1, 1), (60, 40), (3000, 1 << 20), (500, 1 << 62)])
def test_unique_rows_lie_unit_by_unit_and_every_row_finds_its_place(backend, units, n, most):
    rows = _rows(n, most, units)
    unique, places = unique_by_unit(rows, units, backend=backend)
    assert unique.tolist() == sorted(set(rows.tolist()), key=lambda row: (row % units, row))
    assert torch.equal(unique[places], rows)
    assert rows.tolist() == _rows(n, most, units).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("units", [1, 3, 4])
@pytest.mark.parametrize(("n", "most"), [(0, 1), (1, 1), (60, 40), (3000, 1 << 20), (500, 1 << 62)])
def test_the_uses_of_every_unique_row_come_with_it(backend, units, n, most):
    rows = _rows(n, most, units)
    unique, places, uses = unique_with_uses(rows, units, backend=backend)
    for one, other in zip((unique, places), unique_by_unit(rows, units)):
        assert torch.equal(one, other)
    assert uses.starts.dtype == uses.order.dtype == torch.int32
    found = [part.tolist() for part in uses.order.split(uses.starts.diff().tolist())] if n else []
    wanted = [(rows == row).nonzero().flatten().tolist() for row in unique]
    assert found == wanted and uses.starts[0] == 0 and uses.starts[-1] == n


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("units", [1, 2, 3, 4, 7])
def test_rows_are_split_by_unit(backend, units):
    rows, _ = unique_by_unit(_rows(200, 5000, units), units)
    counts, periods, in_order = split_by_unit(rows, units, backend=backend)
    assert counts == [sum(row % units == unit for row in rows.tolist()) for unit in range(units)]
    assert periods.tolist() == [row // units for row in rows.tolist()]
    assert in_order
    assert split_by_unit(rows.flip(0), units, backend=backend)[2] == (units == 1)
    assert split_by_unit(rows[:0], units, backend=backend)[0] == [0] * units


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("shards", "k", "m"), [(1, 1, 0), (5, 4, 1), (6, 4, 1), (7, 3, 2), (12, 8, 3)]
)
def test_rows_are_split_by_the_shard_that_holds_them(backend, shards, k, m):
    layout = RowLayout(StripeShape(shards, k, m), 5000)
    rows = _rows(300, 5000, shards)
    counts, places, local = split_by_shard(rows, k, m, shards, backend=backend)
    holder, there = layout.locate(rows)
    assert torch.equal(places, holder.argsort(stable=True)) and torch.equal(local, there[places])
    assert counts == torch.bincount(holder, minlength=shards).tolist()
    assert split_by_shard(rows[:0], k, m, shards, backend=backend)[0] == [0] * shards


def test_stripes_wider_than_there_are_shards_are_refused():
    with pytest.raises(ValueError, match=r"4\+2 units on 5 shards"):
        split_by_shard(torch.tensor([1]), 4, 2, 5)


@pytest.mark.parametrize("operation", [unique_by_unit, split_by_unit])
def test_wrong_arguments_are_refused_with_the_numbers(operation):
    with pytest.raises(ValueError, match=r"rows\[1\] is -3"):
        operation(torch.tensor([2, -3]), 4)
    with pytest.raises(TypeError, match="torch.int32"):
        operation(torch.tensor([2], dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="0 units"):
        operation(torch.tensor([2]), 0)


def test_there_is_no_triton_kernel_to_ask_for_where_the_host_needs_the_counts():
    with pytest.raises(ValueError, match="split_by_unit: no Triton kernel"):
        split_by_unit(torch.tensor([1]), 2, backend="triton")

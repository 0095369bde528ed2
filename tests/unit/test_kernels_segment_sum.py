"""segment_sum: the C++ against a loop over the uses, to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ecrm.kernels.divide import divide
from ecrm.kernels.scatter_add import scatter_add
from ecrm.kernels.segment_sum import segment_sum
from ecrm.kernels.unit_order import Uses, unique_with_uses


def _case(n: int, dimension: int, most: int = 9) -> tuple[Uses, torch.Tensor, torch.Tensor, int]:
    """Uses, values whose sums depend on the order, a picked value for each use, and the rows."""
    random = torch.Generator().manual_seed(dimension)
    rows = torch.randint(0, most, (n,), generator=random)
    exponents = torch.randint(-4, 5, (n + 3, 1), generator=random)
    values = torch.randn(n + 3, dimension, generator=random) * 10.0**exponents
    values[::7] = -0.0
    unique, _, uses = unique_with_uses(rows, 1)
    return uses, values, torch.randint(0, n + 3, (n,), generator=random), len(unique)


def _looped(uses: Uses, values: torch.Tensor, divisor: float) -> torch.Tensor:
    starts, order = uses.starts.tolist(), uses.order.tolist()
    sums = np.zeros((len(starts) - 1, values.shape[1]), np.float32)
    for row, (start, end) in enumerate(zip(starts, starts[1:])):
        for use in order[start:end]:
            sums[row] += values[use].numpy()
    return torch.from_numpy(sums / np.float32(divisor))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


@pytest.mark.parametrize("divisor", [1.0, 3.0])
@pytest.mark.parametrize("n", [0, 1, 60])
@pytest.mark.parametrize("dimension", [1, 3, 8, 13, 16, 60, 128, 250])
def test_equals_a_loop_in_the_order_of_uses(backend, dimension, n, divisor):
    uses, values, picked, rows = _case(n, dimension)
    wide = torch.full((rows, dimension + 2), math.nan)
    for choice in (None, picked):
        of_uses = values[:n].contiguous() if choice is None else values
        expected = _looped(uses, of_uses if choice is None else values[choice], divisor)
        out = torch.full((rows, dimension), math.nan)
        for into in (out, wide[:, 1:-1]):
            assert segment_sum(into, uses, of_uses, choice, divisor, backend=backend)
            assert _same_bits(into, expected)
        assert wide[:, 0].isnan().all() and wide[:, -1].isnan().all()


@pytest.mark.parametrize("dimension", [3, 16, 130])
def test_weighted_values_are_rounded_before_they_are_added(backend, dimension):
    uses, values, picked, rows = _case(60, dimension)
    weights = torch.randn(60, generator=torch.Generator().manual_seed(dimension))
    expected = _looped(uses, values[picked] * weights.unsqueeze(1), 3.0)
    out = torch.full((rows, dimension), math.nan)
    assert segment_sum(out, uses, values, picked, 3.0, weights, backend=backend)
    assert _same_bits(out, expected)
    of_uses = values[:60].contiguous()
    assert segment_sum(out, uses, of_uses, None, 1.0, weights, backend=backend)
    assert _same_bits(out, _looped(uses, of_uses * weights.unsqueeze(1), 1.0))


def test_sums_past_the_caches_are_those_of_two_passes(backend):
    """Enough rows for the sums to be streamed; the comparison has the operations of before."""
    uses, values, picked, rows = _case(9000, 128, most=6000)
    places = torch.empty(9000, dtype=torch.int64)
    places[uses.order.long()] = torch.arange(rows).repeat_interleave(uses.starts.diff().long())
    sums, seen = torch.zeros(rows, 128), torch.zeros(rows, dtype=torch.uint8)
    scatter_add(sums, places, values, picked=picked, seen=seen)
    divide(sums, 5.0)
    out = torch.empty(rows + 1, 128)
    for into in (out[:-1], out.view(-1)[1 : 1 + rows * 128].view(rows, 128)):
        assert into.nbytes > 1 << 20
        assert segment_sum(into, uses, values, picked, 5.0, backend=backend)
        assert _same_bits(into, sums)


def test_a_row_without_uses_becomes_zeros(backend):
    uses = Uses(torch.tensor([0, 0, 1, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    out = torch.full((3, 17), math.nan)
    assert segment_sum(out, uses, torch.ones(1, 17), divisor=2.0, backend=backend)
    assert out.tolist() == [[0.0] * 17, [0.5] * 17, [0.0] * 17]


@pytest.mark.parametrize("place", [0, 15, 16, 64, 129])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_number_that_is_not_finite_is_found(backend, bad, place):
    uses = Uses(torch.tensor([0, 2], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32))
    values, out = torch.full((2, 130), torch.finfo(torch.float32).max), torch.empty(1, 130)
    values[1] = 0
    assert segment_sum(out, uses, values, backend=backend)
    assert not segment_sum(out, uses, values, divisor=0.5, backend=backend), "a quotient overflows"
    values[1, place] = bad
    assert not segment_sum(out, uses, values, backend=backend)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"values": torch.ones(2, 5)}, ValueError, r"values has shape \[2, 5\], needed: \[2, 4\]"),
        ({"values": torch.ones(2, 4).double()}, TypeError, "values is torch.float64"),
        ({"picked": torch.tensor([0, 2])}, ValueError, r"picked\[1\] is 2, outside 0..1"),
        ({"weights": torch.ones(1)}, ValueError, r"weights has shape \[1\], needed: \[2\]"),
        ({"weights": torch.ones(2).double()}, TypeError, "weights are torch.float64"),
        ({"picked": torch.tensor([0])}, ValueError, r"picked has shape \[1\], needed: \[2\]"),
        ({"uses": ([0, 2], [0, 1])}, ValueError, r"starts has shape \[2\], needed: \[3\]"),
        ({"uses": ([0, 1, 2], [0, 2])}, ValueError, "uses are not 2 places in the order of 2"),
        ({"uses": ([0, 1, 2], [0, -1])}, ValueError, "uses are not 2 places in the order of 2"),
        ({"uses": ([0, 3, 2], [0, 1])}, ValueError, "uses are not 2 places in the order of 2"),
        ({"uses": ([0, 1, 1], [0, 1])}, ValueError, "uses are not 2 places in the order of 2"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_write(change, error, message):
    out, given = torch.full((2, 4), 7.0), {"uses": ([0, 1, 2], [0, 1]), "values": torch.ones(2, 4)}
    given |= change
    given["uses"] = Uses(*(torch.tensor(part, dtype=torch.int32) for part in given["uses"]))
    with pytest.raises(error, match=message):
        segment_sum(out, **given)
    assert (out == 7).all()


def test_uses_of_another_dtype_are_refused():
    uses = Uses(torch.tensor([0, 1]), torch.tensor([0]))
    with pytest.raises(TypeError, match=r"starts is torch.int64 \[2\]"):
        segment_sum(torch.empty(1, 4), uses, torch.ones(1, 4))


@pytest.mark.parametrize("dimension", [1, 16, 60, 128])
def test_rounded_sums_are_torchs_cast_of_a_sum(backend, dimension):
    random = torch.Generator().manual_seed(dimension)
    ids = torch.randint(0, 9, (40,), generator=random)
    uses = unique_with_uses(ids, 1)[2]
    values = torch.randn(40, dimension, generator=random)
    exact, found = (torch.empty(len(uses.starts) - 1, dimension) for _ in range(2))
    assert segment_sum(exact, uses, values, divisor=3.0)
    assert segment_sum(found, uses, values, divisor=3.0, rounded_to=torch.bfloat16, backend=backend)
    assert torch.equal(found, exact.bfloat16().float()) and not torch.equal(found, exact)
    values[:] = torch.finfo(torch.float32).max  # above the largest number of 16 bits
    one = unique_with_uses(torch.arange(40), 1)[2]
    found = torch.empty(40, dimension)
    assert segment_sum(found, one, values, backend=backend)
    assert not segment_sum(found, one, values, rounded_to=torch.bfloat16, backend=backend)

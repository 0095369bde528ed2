"""divide: the C++ against torch's division, to the bit, and numbers that are not finite."""

from __future__ import annotations

import math

import pytest
import torch

from ecrm.kernels.divide import divide


def numbers(count: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(count)
    exponents = torch.randint(-44, 38, (count,), generator=random)
    return (torch.randn(count, generator=random).double() * 10.0**exponents).float()


@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0, 7.0, 0.1, 65536.0])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000])
def test_quotients_are_torchs_to_the_bit(backend, count, divisor):
    values = numbers(count)
    expected, out = values / divisor, torch.full((count,), math.nan)
    finite = bool(expected.isfinite().all())
    assert divide(values, divisor, out, backend=backend) == finite
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))
    assert divide(values, divisor, backend=backend) == finite
    assert torch.equal(values.view(torch.int32), expected.view(torch.int32)), "in place"


@pytest.mark.parametrize("divisor", [1.0, 3.0])
@pytest.mark.parametrize("place", [0, 15, 16, 39, 40])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_number_that_is_not_finite_is_found(backend, bad, place, divisor):
    values = torch.ones(41)
    assert divide(values, divisor, backend=backend)
    values[place] = bad
    assert not divide(values, divisor, backend=backend)


def test_largest_numbers_are_finite_though_their_sum_is_not(backend):
    values = torch.full((8, 8), torch.finfo(torch.float32).max)
    assert divide(values, 1.0, backend=backend)
    assert not divide(values, 0.5, backend=backend), "a quotient overflows"


def test_wrong_arguments_are_refused_with_their_numbers():
    with pytest.raises(TypeError, match="float64"):
        divide(torch.ones(3, dtype=torch.float64), 2.0)
    with pytest.raises(ValueError, match="contiguous"):
        divide(torch.ones(3, 4)[:, :2], 2.0)
    with pytest.raises(ValueError, match=r"\[4\]"):
        divide(torch.ones(3), 2.0, torch.ones(4))

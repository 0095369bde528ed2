"""row_digest: the C++ against the definition, and changes that a sum must show."""

from __future__ import annotations

import pytest
import torch

from ecrm.kernels.row_digest import LANES, row_digest


def drawn(rows: int, floats: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with every kind of bits, NaN among them, and row numbers below 2 * `rows`."""
    random = torch.Generator().manual_seed(rows * 100 + floats)
    words = torch.randint(-(2**31), 2**31, (rows, floats), generator=random, dtype=torch.int32)
    return words.view(torch.float32), torch.randperm(2 * rows, generator=random)[:rows]


def sums(rows: torch.Tensor, numbers: torch.Tensor, backend: str) -> list[int]:
    return row_digest(rows, numbers, backend).tolist()


@pytest.mark.parametrize("floats", [1, 2, 3, 8, 16, 17, 33, 128])
@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_sums_are_the_references(backend, rows, floats):
    values, numbers = drawn(rows, floats)
    assert sums(values, numbers, backend) == sums(values, numbers, "reference")


def test_the_definition_by_hand():
    """Word by word, in numbers of Python."""
    from ecrm.kernels.row_digest import _keys

    values, numbers = drawn(3, 5)
    keys, factors = _keys(5)

    def mix(number: int) -> int:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            number = (number ^ number >> 33) * factor % 2**64
        return number ^ number >> 33

    expected = [0] * LANES
    for row, number in zip(values.view(torch.int32).tolist(), numbers.tolist(), strict=True):
        for lane in range(LANES):
            keyed = [(a + b) % 2**32 for a, b in zip([*row, 0], keys[lane].tolist(), strict=True)]
            products = sum(a * b for a, b in zip(keyed[:3], keyed[3:], strict=True))
            hashed = mix((products + mix(number) * factors[lane].item()) % 2**64)
            expected[lane] = (expected[lane] + hashed) % 2**64
    assert [found % 2**64 for found in sums(values, numbers, "cpu")] == expected


def test_parts_in_any_order_add_up(backend):
    values, numbers = drawn(300, 16)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    parts = [
        row_digest(values[part].contiguous(), numbers[part], backend)
        for part in (order[:7], order[7:150], order[150:])
    ]
    assert torch.stack(parts).sum(0).tolist() == sums(values, numbers, backend)


@pytest.mark.parametrize("floats", [1, 3, 16])
def test_every_bit_and_every_exchange_changes_all_lanes(backend, floats):
    values, numbers = drawn(20, floats)
    before = sums(values, numbers, backend)
    words = values.view(torch.int32)
    for word in range(floats):
        for bit in range(32):
            words[7, word] ^= 1 << bit if bit < 31 else -(2**31)
            assert all(a != b for a, b in zip(sums(values, numbers, backend), before, strict=True))
            words[7, word] ^= 1 << bit if bit < 31 else -(2**31)
    exchanged = numbers.clone()
    exchanged[[3, 4]] = numbers[[4, 3]]
    assert all(a != b for a, b in zip(sums(values, exchanged, backend), before, strict=True))
    assert sums(values, numbers, backend) == before


def test_equal_rows_do_not_cancel(backend):
    """A table of zeros has another sum for every number of rows, and two rows are not none."""
    found = {tuple(sums(torch.zeros(rows, 4), torch.arange(rows), backend)) for rows in range(50)}
    assert len(found) == 50


def test_wrong_arguments_are_refused_with_their_numbers():
    numbers = torch.arange(3)
    with pytest.raises(TypeError, match="float64"):
        row_digest(torch.ones(3, 4).double(), numbers)
    with pytest.raises(ValueError, match=r"\[3, 2\], needed: \[R, F\], contiguous"):
        row_digest(torch.ones(3, 4)[:, :2], numbers)
    with pytest.raises(ValueError, match="4"):
        row_digest(torch.ones(4, 4), numbers)
    with pytest.raises(TypeError, match="int32"):
        row_digest(torch.ones(3, 4), numbers.int())

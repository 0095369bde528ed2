"""Initial values: the same bits from every backend, and what their formula promises."""

import numpy as np
import pytest
import torch

from ecrm.kernels.hash_uniform import hash_uniform

WORD = 2**64 - 1


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return z ^ z >> 31


def value(seed: int, table: int, row: int, column: int, bound: float) -> float:
    """The formula of README.md in Python integers."""
    gamma = 0x9E3779B97F4A7C15
    key = mix(mix(seed + gamma & WORD) ^ table)
    key = mix(key + gamma * (row + 1) & WORD)
    bits = mix(key + gamma * (column + 1) & WORD) >> 40
    return float(np.float32((bits - 2**23) / 2**23) * np.float32(bound))


@pytest.mark.parametrize("seed, table", [(0, 0), (1, 25), (2**64 - 1, 2**64 - 1), (2**63, 7)])
def test_equals_the_formula(backend, seed, table):
    rows = torch.tensor([0, 1, 199_999, 2**31, 2**62, 1])
    found = hash_uniform(seed, table, rows, 13, 0.0125, backend=backend)
    expected = [
        [value(seed, table, row, column, 0.0125) for column in range(13)] for row in rows.tolist()
    ]
    assert found.dtype == torch.float32
    assert found.tolist() == expected


def test_a_bound_of_zero_gives_zeros_of_positive_sign(backend):
    found = hash_uniform(3, 5, torch.arange(40), 16, 0.0, backend=backend)
    assert torch.equal(found.view(torch.int32), torch.zeros(40, 16, dtype=torch.int32))


@pytest.mark.parametrize("dimension", [1, 7, 64, 1024])
def test_every_dimension_equals_the_reference(backend, dimension):
    rows = torch.arange(100) * 977
    expected = hash_uniform(3, 4, rows, dimension, 1.0, backend="reference")
    assert torch.equal(hash_uniform(3, 4, rows, dimension, 1.0, backend=backend), expected)


def test_a_value_depends_on_nothing_else(backend):
    whole = hash_uniform(5, 2, torch.arange(50), 16, 0.5, backend=backend)
    some = hash_uniform(5, 2, torch.tensor([49, 3, 3]), 8, 0.5, backend=backend)
    assert torch.equal(some, whole[[49, 3, 3], :8])
    assert not torch.equal(whole, hash_uniform(6, 2, torch.arange(50), 16, 0.5, backend=backend))
    assert not torch.equal(whole, hash_uniform(5, 3, torch.arange(50), 16, 0.5, backend=backend))


def test_a_table_and_a_bound_of_each_row(backend):
    rows, tables, bounds = (
        torch.tensor([5, 0, 5, 2**62]),
        torch.tensor([3, 3, 0, 25]),
        torch.tensor([0.5, 1.0, 0.25, 0.0]),
    )
    found = hash_uniform(9, tables, rows, 20, bounds, backend=backend)
    for at, (row, table, bound) in enumerate(
        zip(rows, tables.tolist(), bounds.tolist(), strict=True)
    ):
        assert torch.equal(
            found[at], hash_uniform(9, table, row[None], 20, bound, backend=backend)[0]
        )


def test_values_are_uniform_and_within_the_bound():
    bound = 0.01
    values = hash_uniform(1, 1, torch.arange(20_000), 64, bound).double() / bound
    assert values.min() >= -1 and values.max() < 1
    assert abs(values.mean()) < 0.003 and abs(values.var() - 1 / 3) < 0.003
    counts = torch.histc(values, bins=64, min=-1, max=1)
    expected = values.numel() / 64
    # chi-square of 63: beyond 1 in 100,000
    assert float(((counts - expected) ** 2 / expected).sum()) < 130
    columns, rows = values[:, :-1] * values[:, 1:], values[:-1] * values[1:]
    assert abs(columns.mean()) < 0.003 and abs(rows.mean()) < 0.003


def test_nothing_to_do(backend):
    assert hash_uniform(0, 0, torch.zeros(0, dtype=torch.int64), 4, 1.0, backend=backend).shape == (
        0,
        4,
    )
    assert hash_uniform(0, 0, torch.arange(3), 0, 1.0, backend=backend).shape == (3, 0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": -1}, "seed is -1, outside"),
        ({"table": 2**64}, "table is 18446744073709551616, outside"),
        ({"rows": torch.tensor([0, -5])}, r"rows\[1\] is -5, outside"),
        ({"dimension": -1}, "dimension is -1"),
        ({"table": torch.tensor([1, 2, 3])}, r"table has shape \[3\], needed: \[2\]"),
        ({"bound": torch.ones(4)[::2]}, "bound: elements are 2 apart"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        hash_uniform(
            **(
                {"seed": 0, "table": 0, "rows": torch.arange(2), "dimension": 4, "bound": 1.0}
                | change
            )
        )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"table": torch.ones(2)}, "table is torch.float32"),
        ({"bound": torch.ones(2).double()}, "bound is"),
    ],
)
def test_wrong_types_are_refused(change, message):
    with pytest.raises(TypeError, match=message):
        hash_uniform(
            **(
                {"seed": 0, "table": 0, "rows": torch.arange(2), "dimension": 4, "bound": 1.0}
                | change
            )
        )

"""Coefficients, inversion, and refusal of what cannot be decoded."""

from itertools import combinations

import numpy as np
import pytest

from ecrm.protection.coding import gf256
from ecrm.protection.coding.code import make_coefficients


@pytest.mark.parametrize("k, m", [(1, 1), (4, 1), (6, 2), (8, 3), (1, 3)])
def test_up_to_three_parities_are_isa_l_vandermonde(k, m):
    found = make_coefficients(k, m)
    assert found.shape == (m, k)
    for t in range(m):
        for d in range(k):
            assert found[t, d] == gf256.power(gf256.power(2, t), d)
    assert (found[0] == 1).all()


@pytest.mark.parametrize("k, m", [(4, 4), (6, 4), (3, 5), (251, 4), (5, 250)])
def test_more_than_three_parities_are_cauchy(k, m):
    found = make_coefficients(k, m)
    assert found.shape == (m, k)
    for t in range(0, m, 7):
        for d in range(0, k, 7):
            assert gf256.multiply(int(found[t, d]), (k + t) ^ d) == 1


def test_no_protection_is_a_matrix_without_rows():
    assert make_coefficients(5, 0).shape == (0, 5)


@pytest.mark.parametrize("k, m", [(0, 1), (-1, 2), (4, -1), (254, 2), (200, 56), (256, 0)])
def test_sizes_out_of_range_are_refused_with_the_numbers(k, m):
    with pytest.raises(ValueError, match=rf"k={k}, m={m}, k \+ m = {k + m}"):
        make_coefficients(k, m)


def determinants(parts: np.ndarray) -> np.ndarray:
    """Determinants, uint8 [n], of the parts uint8 [size, n, size]; minus is plus in this field."""
    size = parts.shape[0]
    if size == 1:
        return parts[0, :, 0]
    total = np.zeros(parts.shape[1], dtype=np.uint8)
    for column in range(size):
        others = [c for c in range(size) if c != column]
        total ^= gf256.PRODUCT[parts[0, :, column], determinants(parts[1:, :, others])]
    return total


def singular_parts(entries: np.ndarray, size: int) -> int:
    """How many size x size parts of the matrix have no inverse."""
    m, k = entries.shape
    columns = np.array(list(combinations(range(k), size)))
    return sum(
        int(np.count_nonzero(determinants(entries[list(rows)][:, columns]) == 0))
        for rows in combinations(range(m), size)
    )


@pytest.mark.parametrize("k, m", [(254, 1), (253, 2), (120, 3), (16, 4), (10, 6)])
def test_every_square_part_has_an_inverse(k, m):
    """All losses of up to m units decode, because every square part has an inverse.

    The matrices of smaller k and m are parts of these.
    """
    entries = make_coefficients(k, m)
    assert [singular_parts(entries, size) for size in range(1, m + 1)] == [0] * m


def test_a_fourth_vandermonde_row_would_not_decode():
    entries = np.array(
        [[gf256.power(gf256.power(2, t), d) for d in range(26)] for t in range(4)], dtype=np.uint8
    )
    assert (
        singular_parts(entries, 4) > 0
        or singular_parts(entries, 3) > 0
        or singular_parts(entries, 2) > 0
    )


def test_inverse_times_matrix_is_the_identity():
    random = np.random.default_rng(1)
    inverted = 0
    while inverted < 50:
        square = random.integers(0, 256, size=(random.integers(1, 9),) * 2, dtype=np.uint8)
        try:
            inverse = gf256.invert_matrix(square)
        except ValueError:
            continue
        inverted += 1
        assert np.array_equal(gf256.multiply_matrices(inverse, square), np.eye(square.shape[0]))
        assert np.array_equal(gf256.multiply_matrices(square, inverse), np.eye(square.shape[0]))


def test_matrices_without_an_inverse_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match="the 2 x 2 matrix has no inverse: no pivot in column 1"):
        gf256.invert_matrix(np.array([[1, 2], [1, 2]], dtype=np.uint8))
    with pytest.raises(ValueError, match="this one is 2 x 3"):
        gf256.invert_matrix(np.zeros((2, 3), dtype=np.uint8))

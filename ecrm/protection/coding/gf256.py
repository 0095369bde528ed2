"""The field GF(2^8) with polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d), and matrices over it.

ISA-L and most storage codes use the same polynomial. Addition is XOR. Multiplication is carry-less
multiplication modulo the polynomial. The element 2 generates all 255 non-zero elements, so
logarithms exist.
"""

from __future__ import annotations

import numpy as np

POLYNOMIAL = 0x11D
ORDER = 255  # of the multiplicative group


def _powers_of_two() -> np.ndarray:
    powers = np.zeros(2 * ORDER, dtype=np.uint8)
    value = 1
    for exponent in range(ORDER):
        powers[exponent] = powers[exponent + ORDER] = value
        value <<= 1
        if value & 0x100:
            value ^= POLYNOMIAL
    return powers


def _products() -> np.ndarray:
    table = np.zeros((256, 256), dtype=np.uint8)
    table[1:, 1:] = EXP[LOG[1:, None] + LOG[None, 1:]]
    return table


EXP = _powers_of_two()
"""uint8 [510]: `EXP[i]` is `2^i`, written twice: a sum of two logarithms needs no modulo."""

LOG = np.zeros(256, dtype=np.int64)
"""int64 [256]: `2^LOG[a] == a` for a >= 1. `LOG[0]` has no meaning."""
LOG[EXP[:ORDER]] = np.arange(ORDER)

PRODUCT = _products()
"""uint8 [256, 256]: `PRODUCT[a, b]` is a times b."""

for _table in (EXP, LOG, PRODUCT):
    _table.setflags(write=False)


def multiply(a: int, b: int) -> int:
    """The product of two elements."""
    return int(PRODUCT[a, b])


def inverse(a: int) -> int:
    """The element x with `a * x = 1`. Raises ZeroDivisionError for 0."""
    if a == 0:
        raise ZeroDivisionError("0 has no inverse in GF(2^8)")
    return int(EXP[ORDER - LOG[a]])


def power(a: int, exponent: int) -> int:
    """`a` to a power >= 0, with `0^0 = 1`."""
    if a == 0:
        return int(exponent == 0)
    return int(EXP[(LOG[a] * exponent) % ORDER])


def invert_matrix(matrix: np.ndarray) -> np.ndarray:
    """The inverse of a square uint8 matrix, by Gauss-Jordan elimination.

    Raises ValueError for a matrix not square or without an inverse.
    """
    size = matrix.shape[0]
    if matrix.shape != (size, size):
        raise ValueError(
            "only a square matrix can be inverted, "
            f"this one is {matrix.shape[0]} x {matrix.shape[1]}"
        )
    work = np.concatenate([matrix.astype(np.uint8), np.eye(size, dtype=np.uint8)], axis=1)
    for column in range(size):
        candidates = np.flatnonzero(work[column:, column])
        if candidates.size == 0:
            raise ValueError(
                f"the {size} x {size} matrix has no inverse: no pivot in column {column}"
            )
        pivot = column + int(candidates[0])
        work[[column, pivot]] = work[[pivot, column]]
        work[column] = PRODUCT[inverse(int(work[column, column])), work[column]]
        for row in range(size):
            if row != column and work[row, column]:
                work[row] ^= PRODUCT[work[row, column], work[column]]
    return work[:, size:].copy()


def multiply_matrices(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product uint8 [p, r] of uint8 [p, q] and uint8 [q, r]."""
    products = PRODUCT[a[:, :, None], b[None, :, :]]
    return np.asarray(np.bitwise_xor.reduce(products, axis=1))

"""Coefficient matrices of the code, and their inversion.

Legend: k data units and m parity units per stripe; t counts parity units, d counts data units.
(ISA-L writes m for what is k + m here.)
"""

from __future__ import annotations

import numpy as np

from ecrm.coding import gf256

LARGEST_STRIPE = 255


def coefficients(k: int, m: int) -> np.ndarray:
    """The uint8 [m, k] matrix C with `parity_t = XOR_d C[t, d] * data_d`.

    m <= 3: `(2^t)^d`, the Vandermonde matrix of ISA-L's `gf_gen_rs_matrix`; its first row is all
    ones, so the first parity is a plain XOR. m > 3: `1 / ((k + t) XOR d)`, the Cauchy matrix of
    ISA-L's `gf_gen_cauchy1_matrix`.

    Both decode every loss of m units, that is, every square part has an inverse: of a Cauchy matrix
    always; of three Vandermonde rows because x = 2^d is non-zero and different for each d < 255,
    and so is x^2 (squaring is one-to-one in this field). With a fourth row that ends (x^3 is not
    one-to-one), hence the limit of 3. Raises ValueError where k or m is out of range: such a matrix
    could not decode.
    """
    if k < 1 or m < 0 or k + m > LARGEST_STRIPE:
        raise ValueError(
            f"a stripe needs k >= 1, m >= 0 and k + m <= {LARGEST_STRIPE}: k={k}, m={m}, k + m = {k + m}"
        )
    if m <= 3:
        entries = [[gf256.power(gf256.power(2, t), d) for d in range(k)] for t in range(m)]
    else:
        entries = [[gf256.inverse((k + t) ^ d) for d in range(k)] for t in range(m)]
    return np.array(entries, dtype=np.uint8).reshape(m, k)


def invert(matrix: np.ndarray) -> np.ndarray:
    """The inverse of a square uint8 matrix by Gauss-Jordan elimination. Raises ValueError if there is none."""
    size = matrix.shape[0]
    if matrix.shape != (size, size):
        raise ValueError(
            f"only a square matrix can be inverted, this one is {matrix.shape[0]} x {matrix.shape[1]}"
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
        work[column] = gf256.PRODUCT[gf256.inverse(int(work[column, column])), work[column]]
        for row in range(size):
            if row != column and work[row, column]:
                work[row] ^= gf256.PRODUCT[work[row, column], work[column]]
    return work[:, size:].copy()


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product uint8 [p, r] of uint8 [p, q] and uint8 [q, r]."""
    return np.bitwise_xor.reduce(gf256.PRODUCT[a[:, :, None], b[None, :, :]], axis=1)

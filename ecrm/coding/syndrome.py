"""Which unit of a stripe is wrong, told from what its parity misses: bytes only, no ranks."""

from __future__ import annotations

import numpy as np

from ecrm.coding import gf256


def find_wrong_unit(
    coefficients: np.ndarray, syndromes: np.ndarray
) -> tuple[int, np.ndarray] | None:
    """(unit, error uint8 [n]) of the one unit whose XOR with the error makes a stripe whole; None where that cannot be told.

    `coefficients`, uint8 [m, k], are the code's; `syndromes`, uint8 [m, n], are each parity XOR
    what the data encodes to, not all zero. One unit is taken to be wrong: with m >= 2 it is always
    told, since any two whole stripes differ in m + 1 units or more; with m = 1 never.
    """
    m, k = coefficients.shape
    wrong = np.flatnonzero(syndromes.any(axis=1))
    if m < 2:
        return None
    if wrong.size == 1:
        return k + int(wrong[0]), syndromes[wrong[0]]
    if wrong.size == m:
        for unit in range(k):
            error = gf256.PRODUCT[gf256.inverse(int(coefficients[0, unit]))][syndromes[0]]
            if all(
                np.array_equal(gf256.PRODUCT[coefficients[t, unit]][error], syndromes[t])
                for t in range(1, m)
            ):
                return unit, error
    return None

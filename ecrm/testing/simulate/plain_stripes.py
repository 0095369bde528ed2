"""Places of rows and parity, and the bytes of parity, in plain numpy, written from docs/concepts.

As `plain_rows.py`, this module imports nothing of the project. The field GF(2^8) has tables here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

POLYNOMIAL = 0x11D
MOST_POWERS_OF_TWO = 3
"""Codes of up to as many parities have powers of two as coefficients."""


@dataclass(frozen=True)
class PlainStripes:
    """Stripes of k rows and m parities, on neighbouring shards of a circle of `shards`."""

    shards: int
    k: int
    m: int

    def stripe(self, first: int) -> set[int]:
        """Shards of the stripes beginning on shard `first`."""
        return {(first + unit) % self.shards for unit in range(self.k + self.m)}

    def rows_on(self, shard: int, rows: int) -> NDArray[np.int64]:
        """Row numbers of a shard's rows, int64 [periods, k], in local order.

        The row space has `rows` rows. Numbers from `rows` on are padding.
        """
        unit = np.arange(self.k)
        return (self._periods(rows) + (shard - self.m - unit) % self.shards) * self.k + unit

    def parity_on(self, shard: int, rows: int) -> NDArray[np.int64]:
        """Stripes of a shard's parity rows, int64 [periods, m], in local order."""
        return self._periods(rows) + (shard - np.arange(self.m)) % self.shards

    def _periods(self, rows: int) -> NDArray[np.int64]:
        """The first stripe of every period, int64 [periods, 1]."""
        return self.shards * np.arange(-(-rows // (self.k * self.shards)))[:, None]

    def parity(self, records: NDArray[np.uint8], t: int) -> NDArray[np.uint8]:
        """Parity t of all stripes, uint8 [stripes, B], of records uint8 [rows, B]."""
        stripes = self._periods(len(records)).size * self.shards
        data = np.zeros((stripes * self.k, records.shape[1]), np.uint8)
        data[: len(records)] = records
        units = data.reshape(stripes, self.k, -1)
        parity: NDArray[np.uint8] = np.bitwise_xor.reduce(
            [_multiples(_coefficient(self.k, self.m, t, d))[units[:, d]] for d in range(self.k)]
        )
        return parity


def _powers() -> list[int]:
    """The powers of 2 in the field, from 0 to 254."""
    powers = [1]
    while len(powers) < 255:
        double = powers[-1] << 1
        powers.append(double ^ POLYNOMIAL if double > 255 else double)
    return powers


POWERS = _powers()
LOGARITHMS = {power: exponent for exponent, power in enumerate(POWERS)}


def _coefficient(k: int, m: int, t: int, d: int) -> int:
    """The factor of data unit d of k in parity t of m."""
    if m > MOST_POWERS_OF_TWO:
        return POWERS[-LOGARITHMS[(k + t) ^ d] % 255]
    return POWERS[t * d % 255]


@lru_cache
def _multiples(factor: int) -> NDArray[np.uint8]:
    """The products of every byte and `factor`, uint8 [256]."""
    exponents = [(LOGARITHMS[byte] + LOGARITHMS[factor]) % 255 for byte in range(1, 256)]
    return np.array([0, *(POWERS[each] for each in exponents)], np.uint8)

"""The probability law of the category values of generated rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ecrm.base.errors import UsageError
from ecrm.data import kaggle_shape as shape
from ecrm.data.layout import CATEGORIES

_HEX_VALUES = 1 << 32
# offset for an integral over [r, r + 1] of (x + offset)^-s equal to (r + 1)^-s to 3 %, s near 1.1
_ZIPF_OFFSET = 0.58


@dataclass(frozen=True)
class Categories:
    """The probability law of the values of the 26 columns; every field has a number per column.

    `values` is the number of values of a column, `missing_percent` the share of missing values. An
    id present is 0 with probability `atom`, else `floor(x)`, with x of density proportional to
    (x + offset)^-exponent on [0, values).
    """

    values: tuple[int, ...]
    missing_percent: tuple[float, ...]
    atom: tuple[float, ...]
    exponent: tuple[float, ...]
    offset: tuple[float, ...]

    @cached_property
    def first(self) -> np.ndarray:
        """The number of every column's first value, then the number of all values, int64 [27].

        The values of all columns are numbered through.
        """
        return np.concatenate(([0], np.cumsum(self.values)))

    @cached_property
    def _inverse(self) -> tuple[np.ndarray, ...]:
        """The inverse distributions' constants: (atom, first, range, power, offset), all [26]."""
        atom, exponent, offset = np.array(self.atom), np.array(self.exponent), np.array(self.offset)
        first = offset ** (1 - exponent)
        return (
            atom,
            first,
            (offset + self.values) ** (1 - exponent) - first,
            1 / (1 - exponent),
            offset,
        )

    def draw(self, uniform: np.ndarray) -> np.ndarray:
        """Return ids, int64 [R, 26], from uniform numbers, float64 [R, 26]."""
        atom, first, extent, power, offset = self._inverse
        rest = np.maximum(uniform - atom, 0) / (1 - atom)
        ids: np.ndarray = ((first + rest * extent) ** power - offset).astype(np.int64)
        np.clip(ids, 0, np.array(self.values) - 1, out=ids)
        return ids

    def hex_values(self, ids: np.ndarray) -> np.ndarray:
        """Return the written values of ids, int64 [R, 26]: uint32 [R, 26], unique over all columns.

        The values of all columns are numbered through. The number goes through murmur3's 32-bit
        finaliser, a bijection.
        """
        h: np.ndarray = (ids + self.first[:-1]).astype(np.uint32)
        h ^= h >> np.uint32(16)
        h *= np.uint32(0x85EBCA6B)
        h ^= h >> np.uint32(13)
        h *= np.uint32(0xC2B2AE35)
        h ^= h >> np.uint32(16)
        return h


KAGGLE = Categories(
    shape.CARDINALITIES, shape.CATEGORY_MISSING_PERCENT, *zip(*shape.ZIPF, strict=True)
)
"""The columns of the Kaggle training set, as fitted."""


def zipf(least: float, most: float, values: int) -> Categories:
    """26 columns of `values` values, never missing, drawn by Zipf's law, p(rank) ~ rank^-s.

    From the first column to the last, s goes in equal steps from `least` to `most`. Raises
    `UsageError` for exponents out of range (above 1, at most 10) or not in ascending order, and for
    a number of values out of range.
    """
    if not 1 < least <= most <= 10:
        raise UsageError(
            f"Zipf exponents {least:g} to {most:g}: they must ascend, above 1 and at most 10"
        )
    if not 2 <= values <= _HEX_VALUES // CATEGORIES:
        raise UsageError(
            f"{values} values of each column: 2 to {_HEX_VALUES // CATEGORIES} can be told apart"
        )
    exponents = tuple(float(s) for s in np.linspace(least, most, CATEGORIES))
    none = (0.0,) * CATEGORIES
    return Categories((values,) * CATEGORIES, none, none, exponents, (_ZIPF_OFFSET,) * CATEGORIES)

"""The 64-bit hash behind table row ids and generated effects."""

from __future__ import annotations

import numpy as np


def mix64(values: np.ndarray) -> np.ndarray:
    """Return splitmix64 of each value: uint64 in, uint64 of the same shape out.

    With all arithmetic modulo 2^64:
        z = value + 0x9E3779B97F4A7C15
        z = (z XOR (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z XOR (z >> 27)) * 0x94D049BB133111EB
        result = z XOR (z >> 31)
    Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def row_ids(categories: np.ndarray, missing: np.ndarray, hash_sizes: np.ndarray) -> np.ndarray:
    """Return the table row of every category value.

    The row of a missing value is 0, else `1 + mix64(value) mod (hash_size - 1)`. `categories`
    uint32 [R, 26], `missing` bool [R, 26], `hash_sizes` [26], at least 2; the result is int32
    [R, 26]. Only missing values have row 0.
    """
    ids: np.ndarray = mix64(categories.astype(np.uint64)) % (
        np.asarray(hash_sizes).astype(np.uint64) - np.uint64(1)
    )
    ids += np.uint64(1)
    ids[missing] = 0
    return ids.astype(np.int32)


def cap_rows(ids: np.ndarray, caps: np.ndarray) -> None:
    """Fold row ids in place into tables of `caps` rows.

    0 stays 0, a positive id becomes `1 + (id - 1) mod (cap - 1)`. `ids` is int64 [R, 26], `caps`
    int64 [26], at least 2. A cap not below the table's rows changes nothing.
    """
    missing = ids == 0
    ids -= 1
    ids %= caps - 1
    ids += 1
    ids[missing] = 0

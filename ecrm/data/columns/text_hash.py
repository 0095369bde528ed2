"""The row of a text in a hashed table, for many texts at once."""

from __future__ import annotations

import numpy as np

from ecrm.data.hashing import mix64

_WORD = 8
_MASKS = np.array([(1 << 8 * kept) - 1 for kept in range(_WORD)] + [2**64 - 1], np.uint64)


def text_hash(text: bytes) -> int:
    """Return the 64-bit hash of a text, the plain reference of `text_hashes`.

    The hash begins with the length in bytes. Every 8 bytes, zeros after the last byte, are read as
    a little-endian number `word`; then hash = splitmix64(hash XOR word).
    """
    state = np.array([len(text)], np.uint64)
    for start in range(0, len(text), _WORD):
        word = int.from_bytes(text[start : start + _WORD], "little")
        state = mix64(state ^ np.uint64(word))
    return int(state[0])


def text_hashes(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return `text_hash` of N texts, uint64 [N].

    The text i is `data[starts[i] : starts[i] + lengths[i]]`. `data` is uint8, with at least 8 bytes
    after the last text, or without any byte. `starts` and `lengths` are int64 [N].
    """
    hashes = lengths.astype(np.uint64)
    if not len(lengths) or not lengths.any():
        return hashes
    words = np.ndarray(len(data) - _WORD + 1, "<u8", data, strides=(1,))
    active: np.ndarray | slice = slice(None)
    state = hashes
    left, at = lengths, starts
    while True:
        more = left > 0
        if not more.all():
            chosen = np.flatnonzero(more)
            active = chosen if isinstance(active, slice) else active[chosen]
            state, left, at = state[chosen], left[chosen], at[chosen]
        if not len(left):
            return hashes
        word = np.take(words, at)
        if (left < _WORD).any():
            word &= _MASKS[np.minimum(left, _WORD)]
        state = mix64(state ^ word)
        hashes[active] = state
        left, at = left - _WORD, at + _WORD


def hashed_rows(hashes: np.ndarray, rows: int) -> np.ndarray:
    """Return table rows int32 [N], in 1 to `rows` - 1, of hashes uint64 [N].

    Row 0 is the missing value's. The row is 1 + floor(high * (rows - 1) / 2^32), with the
    high 32 bits of the hash: faster than a remainder.
    """
    high = hashes >> np.uint64(32)
    high *= np.uint64(rows - 1)
    high >>= np.uint64(32)
    found: np.ndarray = high.astype(np.int32)
    found += 1
    return found

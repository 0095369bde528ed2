"""Text fields to numbers, many at once: the arithmetic under the Criteo reader.

Legend: F fields of any array shape; a field is the bytes [start, start + length) of one block. The
block has `PAD` spare bytes on either side, because a field is read as whole 8-byte words.
"""

from __future__ import annotations

import numpy as np

PAD = 8
MAX_DIGITS = 18  # the most decimal digits sure to fit in an int64
MAX_FRACTION_ZEROS = 8
MISSING_WORDS = (b"nan", b"null", b"none")  # in any case
_ZEROS = np.uint64(0x3030303030303030)  # "00000000"
_LOWER = np.uint64(0x2020202020202020)  # the bit for small letters; "0" has the bit already
_BAD = 0x8000
_ANY_BAD = np.uint64(0x8000800080008000)


def _pair_table(digits: bytes, base: int) -> np.ndarray:
    """Return the value of every two-character text, indexed as a little-endian uint16.

    `_BAD` marks a text with a character other than a digit.
    """
    value = np.full(256, base, np.int64)
    value[list(digits.upper())] = np.arange(base)
    value[list(digits)] = np.arange(base)
    text = np.arange(65536)
    first, second = value[text & 255], value[text >> 8]
    return np.where((first < base) & (second < base), first * base + second, _BAD).astype(np.uint16)


_HEX_PAIRS = _pair_table(b"0123456789abcdef", 16)
_DECIMAL_PAIRS = _pair_table(b"0123456789", 10)


def _words(block: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return fields of at most 8 bytes as uint64: the bytes are "0" padding, then the text.

    `lengths` is int64 in 0..8; the block must have `PAD` bytes behind the start of a field.
    """
    at_every_byte = np.ndarray((len(block) - PAD + 1,), "<u8", block, 0, (1,))
    bits = (lengths << 3).astype(np.uint64)
    # numpy defines a shift by all 64 bits as 0, so the empty field becomes "00000000".
    return np.ascontiguousarray(
        (at_every_byte[starts] << (np.uint64(64) - bits)) | (_ZEROS >> bits)
    )


def _pairs(table: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (values of the two-character texts, good) of 8-byte words.

    The values are uint16 [..., 4], first text first; `good` is bool.
    """
    pairs = table[words.view(np.uint16)]
    return pairs.reshape(*words.shape, 4), (pairs.view(np.uint64) & _ANY_BAD) == 0


def parse_hex(
    block: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (uint32 values, bool good); a good field has 0 to 8 hex digits in either case.

    The two results have the shape of `starts`. An empty field is good and 0. The value of a bad
    field means nothing.
    """
    pairs, good = _pairs(_HEX_PAIRS, _words(block, starts, np.minimum(lengths, 8)))
    # The pairs stand most significant first, all below 256: as bytes, a big-endian number.
    values = pairs.astype(np.uint8).view(">u4")[..., 0].astype(np.uint32)
    return values, good & (lengths <= 8)


def parse_decimal(
    block: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (int64 values, bool good); a good field is empty or `-?[0-9]{1,18}`.

    The two results have the shape of `starts`. An empty field is good and 0. The value of a bad
    field means nothing.
    """
    negative = (lengths > 0) & (block[starts] == ord("-"))
    digits = lengths - negative
    good = (digits <= MAX_DIGITS) & ~(negative & (digits == 0))
    remaining = np.where(good, digits, 0)
    ends = starts + lengths
    values = np.zeros(starts.shape, np.int64)
    scale = 1
    while True:
        part = np.minimum(remaining, 8)
        pairs, sound = _pairs(_DECIMAL_PAIRS, _words(block, ends - part, part))
        good &= sound
        halves = pairs[..., ::2] * np.uint16(100) + pairs[..., 1::2]
        values += (halves[..., 0].astype(np.int64) * 10_000 + halves[..., 1]) * scale
        remaining, ends, scale = remaining - part, ends - part, scale * 10**8
        if not remaining.any():
            return np.where(negative, -values, values), good


def without_zero_fraction(block: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return field lengths without a final point followed by 0 to 8 zeros, behind a digit.

    "260.0" becomes "260".
    """
    points = np.flatnonzero(block == ord("."))
    if not len(points):
        return lengths
    ends = starts + lengths
    point = points[np.minimum(np.searchsorted(points, starts), len(points) - 1)]
    zeros = ends - point - 1
    ends_so = (
        (point > starts)
        & (zeros >= 0)
        & (zeros <= MAX_FRACTION_ZEROS)
        & (block[point - 1] - np.uint8(ord("0")) < 10)
    )
    zeros = np.where(ends_so, zeros, 0)
    ends_so &= _words(block, ends - zeros, zeros) == _ZEROS
    return np.where(ends_so, point - starts, lengths)


def without_missing_words(block: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the lengths of the fields, 0 for `MISSING_WORDS` (words for a missing value)."""
    perhaps = np.nonzero(((lengths == 3) | (lengths == 4)) & (block[starts] | 0x20 == ord("n")))
    words = _words(block, starts[perhaps], lengths[perhaps]) | _LOWER
    known = [int.from_bytes(word.rjust(8, b"0"), "little") for word in MISSING_WORDS]
    lengths = lengths.copy()
    lengths[tuple(axis[np.isin(words, np.array(known, np.uint64))] for axis in perhaps)] = 0
    return lengths

"""Rows to Criteo text, many at once: the inverse of the reader."""

from __future__ import annotations

import numpy as np

from ecrm.data.layout import CATEGORIES, INTEGERS

_TAB, _NEWLINE, _MINUS = b"\t\n-"
_INTEGER_WIDTH = 10  # sign, eight digits, separator
_CATEGORY_WIDTH = 9
_HEX4 = np.frombuffer(b"".join(b"%04x" % i for i in range(65536)), np.uint32)
_DECIMAL4 = np.frombuffer(b"".join(b"%04d" % i for i in range(10_000)), np.uint32)
_POWERS_OF_TEN = 10 ** np.arange(1, 8)
# a shift by 64 gives 0
_LAST_BYTES = np.uint64(2**64 - 1) << (np.uint64(64) - 8 * np.arange(9, dtype=np.uint64))


def format_rows(
    labels: np.ndarray, integers: np.ndarray, categories: np.ndarray, missing: np.ndarray
) -> bytes:
    """Return R lines in the layout of Kaggle's `train.txt`, missing values as empty fields.

    `labels` uint8 [R] in {0, 1}, `integers` int64 [R, 13] in -99,999,999 to 99,999,999 (not
    checked), `categories` uint32 [R, 26], `missing` bool [R, 39], integers first.
    """
    # Every field gets the full width, with NULs around a shorter text; then the NULs go.
    rows = len(labels)
    text = np.zeros((rows, 2 + INTEGERS * _INTEGER_WIDTH + CATEGORIES * _CATEGORY_WIDTH), np.uint8)
    text[:, 0] = labels + ord("0")
    text[:, 1] = _TAB
    numbers = text[:, 2 : 2 + INTEGERS * _INTEGER_WIDTH].reshape(rows, INTEGERS, _INTEGER_WIDTH)
    _put_integers(numbers, integers, missing[:, :INTEGERS])
    values = text[:, 2 + INTEGERS * _INTEGER_WIDTH :].reshape(rows, CATEGORIES, _CATEGORY_WIDTH)
    _put_categories(values, categories, missing[:, INTEGERS:])
    text[:, -1] = _NEWLINE
    return text.tobytes().translate(None, b"\0")


def _put_integers(fields: np.ndarray, integers: np.ndarray, missing: np.ndarray) -> None:
    """Write uint8 [R, 13, 10]: NULs, sign, digits right-aligned in the first nine, then a tab."""
    magnitude = np.abs(integers)
    length = 1 + np.searchsorted(_POWERS_OF_TEN, magnitude, side="right")
    length[missing] = 0
    digits = np.stack(
        (_DECIMAL4[magnitude // 10_000], _DECIMAL4[magnitude % 10_000]), axis=-1
    ).view(np.uint64)[..., 0]
    fields[..., 1:9] = (digits & _LAST_BYTES[length])[..., None].view(np.uint8)
    row, column = np.nonzero((integers < 0) & ~missing)
    fields[row, column, 8 - length[row, column]] = _MINUS
    fields[..., 9] = _TAB


def _put_categories(fields: np.ndarray, categories: np.ndarray, missing: np.ndarray) -> None:
    """Write uint8 [R, 26, 9]: eight hex digits or NULs, then a tab."""
    digits = np.stack((_HEX4[categories >> 16], _HEX4[categories & 0xFFFF]), axis=-1)
    digits[missing] = 0
    fields[..., :8] = digits.view(np.uint8)
    fields[..., 8] = _TAB

"""Criteo lines to arrays by pyarrow, many at once: the fast part of the Criteo reader.

Legend: R rows, every one a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ecrm.data.columns.arrow import pyarrow
from ecrm.data.layout import CATEGORIES, COLUMN_NAMES, COLUMNS, INTEGERS, LineLayout

_DIGITS, _HEX_DIGITS = b"0123456789", b"0123456789abcdefABCDEF"
_LONGEST_INTEGER = 18  # characters: the most digits sure to fit in an int64
_LONGEST_CATEGORY = 8
_QUOTED, _FRACTION, _WORD = r'(?s)^"(.*)"$', r"(?s)^(.*[0-9])\.0{0,8}$", "(?i)^(nan|null|none)$"
_JOINS = tuple(
    tuple(map(np.uint64, numbers))
    for numbers in (
        (4, 8, 0x00FF00FF00FF00FF),
        (8, 16, 0x0000FFFF0000FFFF),
        (16, 32, 0x00000000FFFFFFFF),
    )
)


class FieldError(Exception):
    """A line may be malformed, or written in a rare way."""


@dataclass(frozen=True)
class Fields:
    """The fields of R lines: see `ecrm.data.criteo.Rows`."""

    labels: np.ndarray
    integers: np.ndarray
    categories: np.ndarray
    missing: np.ndarray

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[int | None]]) -> Fields:
        """The fields of rows of 40 values, None for a missing value."""
        values = np.array(rows, object).reshape(len(rows), COLUMNS)
        missing = np.array(values[:, 1:] == None, bool)  # noqa: E711
        values[:, 1:][missing] = 0
        return cls(
            values[:, 0].astype(np.uint8),
            values[:, 1 : 1 + INTEGERS].astype(np.int64),
            values[:, 1 + INTEGERS :].astype(np.uint32),
            missing,
        )

    @classmethod
    def joined(cls, parts: Sequence[Fields]) -> Fields:
        """The rows of all parts, one part after the other."""
        parts = [*parts, cls.of_rows([])]
        names = ("labels", "integers", "categories", "missing")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def fields_of(text: bytes, layout: LineLayout) -> Fields:
    """Return the fields of lines, each with a line feed; blank lines are left out.

    Raises FieldError if a line may be malformed. Not checked: that a line has no carriage return
    inside, and the length of lines.
    """
    if not text:
        return Fields.of_rows([])
    try:
        columns = _columns(text, layout)
        rows = len(columns[0])
        if not rows:
            return Fields.of_rows([])
        labels = _checked(columns[0], b"01", 1)
        if labels.lengths.min(initial=1) == 0:
            raise FieldError
        integers = np.empty((rows, INTEGERS), np.int64)
        categories = np.empty((rows, CATEGORIES), np.uint32)
        missing = np.empty((rows, INTEGERS + CATEGORIES), bool)
        for place, column in enumerate(columns[1:]):
            is_integer = place < INTEGERS
            found = (
                _checked(column, _DIGITS + b"-", _LONGEST_INTEGER)
                if is_integer
                else _checked(column, _HEX_DIGITS, _LONGEST_CATEGORY)
            )
            np.equal(found.lengths, 0, out=missing[:, place])
            if is_integer:
                integers[:, place] = _integers(column, found)
            else:
                categories[:, place - INTEGERS] = _from_hex(found)
    except pyarrow.ArrowException:
        raise FieldError from None
    return Fields(labels.data[labels.ends - 1] - np.uint8(ord("0")), integers, categories, missing)


def _columns(text: bytes, layout: LineLayout) -> list[Any]:
    """The 40 columns as pyarrow.StringArray [R], null or "" for a missing value."""
    names = [f"column {place}" for place in range(layout.columns)]
    wanted = [names[place] for place in layout.order]
    table = pyarrow.csv.read_csv(
        pyarrow.py_buffer(text),
        pyarrow.csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=names),
        pyarrow.csv.ParseOptions(delimiter=layout.delimiter.decode(), quote_char=False),
        pyarrow.csv.ConvertOptions(
            check_utf8=False,
            column_types=dict.fromkeys(wanted, pyarrow.string()),
            include_columns=wanted,
            null_values=[""],
            strings_can_be_null=True,
        ),
    )
    columns = [table.column(name).combine_chunks() for name in wanted]
    return list(map(_as_without_header, COLUMN_NAMES, columns)) if layout.header else columns


def _as_without_header(name: str, column: Any) -> Any:
    """A column under a header in the spelling of files without a header."""
    replace = pyarrow.compute.replace_substring_regex
    data = _buffer(column)
    if b'"' in data:
        column = replace(column, _QUOTED, r"\1")
    if not name.startswith("cat_") and b"." in data:
        column = replace(column, _FRACTION, r"\1")
    if name != "label" and (b"n" in data or b"N" in data):
        word = pyarrow.compute.match_substring_regex(column, _WORD)
        column = pyarrow.compute.if_else(word, "", column)
    return column


@dataclass(frozen=True)
class _Bytes:
    """The bytes of a column: field i is `data[ends[i] - lengths[i] : ends[i]]`.

    `data` uint8 has 8 bytes before the first field. `ends` and `lengths` are int64 [R].
    """

    data: np.ndarray
    ends: np.ndarray
    lengths: np.ndarray


def _buffer(column: Any) -> bytes:
    """The bytes of all fields of a column, which begins with its buffer."""
    data = column.buffers()[2]
    return b"" if data is None else data.to_pybytes()


def _checked(column: Any, allowed: bytes, longest: int) -> _Bytes:
    """The bytes of a column. Raises FieldError for a longer field and for other bytes."""
    data = _buffer(column)
    ends = np.frombuffer(column.buffers()[1], np.int32)[: len(column) + 1].astype(np.int64)
    data = data[: ends[-1]]
    lengths = np.diff(ends)
    if lengths.max(initial=0) > longest or data.translate(None, allowed):
        raise FieldError
    return _Bytes(np.frombuffer(bytes(8) + data, np.uint8), ends[1:] + 8, lengths)


def _integers(column: Any, found: _Bytes) -> np.ndarray:
    """The integers of a column, int64 [R]."""
    if column.null_count != np.count_nonzero(found.lengths == 0):
        empty = pyarrow.array(found.lengths == 0)
        column = pyarrow.compute.if_else(empty, pyarrow.scalar(None, pyarrow.string()), column)
    values = column.cast(pyarrow.int64()).fill_null(0)
    integers: np.ndarray = values.to_numpy(zero_copy_only=False)
    return integers


def _from_hex(found: _Bytes) -> np.ndarray:
    """The numbers of at most 8 hexadecimal digits, uint32 [R]; 0 for an empty field.

    The last 8 bytes up to the end of a field are read as a word, and those before the field become
    0. A byte is a digit, its value byte AND 15, plus 9 for a letter. The digits of a word are then
    joined in pairs, fours and eights; the first digit is the word's lowest byte.
    """
    words = np.ndarray(len(found.data) - 7, "<u8", found.data, strides=(1,))[found.ends - 8]
    others = (8 * (8 - found.lengths)).astype(np.uint64)
    words >>= others  # a shift by 64 gives 0
    words <<= others
    letters = (words >> np.uint64(6)) & np.uint64(0x0101010101010101)
    letters *= np.uint64(9)
    words &= np.uint64(0x0F0F0F0F0F0F0F0F)
    words += letters
    for left, right, kept in _JOINS:
        words = ((words << left) | (words >> right)) & kept
    numbers: np.ndarray = words.astype(np.uint32)
    return numbers

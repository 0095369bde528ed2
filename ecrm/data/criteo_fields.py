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


_NONE = np.zeros(0, np.int64)


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

    def with_rows(self, rows: Fields, places: np.ndarray) -> Fields:
        """These rows and further `rows`, which take the places int64 [R] among all rows."""
        count = len(self.labels) + len(rows.labels)
        others = np.ones(count, bool)
        others[places] = False
        joined = []
        for name in ("labels", "integers", "categories", "missing"):
            mine, given = getattr(self, name), getattr(rows, name)
            into = np.empty((count, *mine.shape[1:]), mine.dtype)
            into[others], into[places] = mine, given
            joined.append(into)
        return Fields(*joined)


def fields_of(text: bytes, layout: LineLayout) -> tuple[Fields, np.ndarray]:
    """Return the fields of lines, and the numbers of lines left out, from 0, int64, ascending.

    A line left out may be malformed, or is a row written in a rare way. Every line ends in a line
    feed. Not checked: that lines are UTF-8, that no line is blank or has a carriage return inside,
    and the length of lines.
    """
    columns, wrong = _columns(text, layout) if text else ([], [])
    if not columns or not len(columns[0]):
        return Fields.of_rows([]), np.array(wrong, np.int64)
    fields, doubtful = _numbers(columns)
    left_out = np.array(wrong, np.int64)
    if doubtful.any():
        parsed = np.delete(np.arange(len(doubtful) + len(wrong)), left_out)
        left_out = np.union1d(left_out, parsed[doubtful])
        kept = pyarrow.array(~doubtful)
        fields, _ = _numbers([column.filter(kept) for column in columns])
    return fields, left_out


def _numbers(columns: Sequence[Any]) -> tuple[Fields, np.ndarray]:
    """The numbers of 40 columns [R], and the doubtful rows, bool [R]; no numbers if there are any.

    Columns are converted one after the other, while their bytes are in the cache.
    """
    rows = len(columns[0])
    doubtful = np.zeros(rows, bool)
    labels = np.zeros(rows, np.uint8)
    integers = np.empty((rows, INTEGERS), np.int64)
    categories = np.empty((rows, CATEGORIES), np.uint32)
    missing = np.empty((rows, INTEGERS + CATEGORIES), bool)
    is_sound = True
    for place, column in enumerate(columns if rows else (), -1):
        found = _Bytes.of(column)
        if len(odd := _odd_rows(found, place)):
            doubtful[odd], is_sound = True, False
        if not is_sound:
            continue
        if place < 0:
            labels = found.data[found.ends - 1] - np.uint8(ord("0"))
            continue
        np.equal(found.lengths, 0, out=missing[:, place])
        if place < INTEGERS:
            integers[:, place] = _integers(column, found)
        else:
            categories[:, place - INTEGERS] = _from_hex(found)
    return Fields(labels, integers, categories, missing), doubtful


def _columns(text: bytes, layout: LineLayout) -> tuple[list[Any], list[int]]:
    """The 40 columns as pyarrow.StringArray [R], null or "" for a missing value.

    Also the numbers, from 0, of the lines with another number of columns, which have no row.
    """
    wrong: list[int] = []

    def skip(row: Any) -> str:
        wrong.append(row.number - 1)
        return "skip"

    names = [f"column {place}" for place in range(layout.columns)]
    wanted = [names[place] for place in layout.order]
    table = pyarrow.csv.read_csv(
        pyarrow.py_buffer(text),
        pyarrow.csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=names),
        pyarrow.csv.ParseOptions(
            delimiter=layout.delimiter.decode(), quote_char=False, invalid_row_handler=skip
        ),
        pyarrow.csv.ConvertOptions(
            check_utf8=False,
            column_types=dict.fromkeys(wanted, pyarrow.string()),
            include_columns=wanted,
            null_values=[""],
            strings_can_be_null=True,
        ),
    )
    columns = [table.column(name).combine_chunks() for name in wanted]
    if layout.header:
        columns = list(map(_as_without_header, COLUMN_NAMES, columns))
    return columns, wrong


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


def _buffer(column: Any) -> bytes:
    """The bytes of all fields of a column, which begins with its buffer."""
    data = column.buffers()[2]
    return b"" if data is None else data.to_pybytes()


@dataclass(frozen=True)
class _Bytes:
    """The bytes of a column: field i is `data[ends[i] - lengths[i] : ends[i]]`.

    `text` has the same bytes, and `data` uint8 has 8 bytes before the first field. `ends` and
    `lengths` are int64 [R].
    """

    text: bytes
    data: np.ndarray
    ends: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, column: Any) -> _Bytes:
        """The bytes of a column, a pyarrow.StringArray [R] with an R of at least 1."""
        bounds = np.frombuffer(column.buffers()[1], np.int32)[: len(column) + 1].astype(np.int64)
        text = _buffer(column)[: bounds[-1]]
        data = np.frombuffer(bytes(8) + text, np.uint8)
        return cls(text, data, bounds[1:] + 8, np.diff(bounds))

    def rows_with(self, positions: np.ndarray) -> np.ndarray:
        """The rows of bytes at `positions` of `text`."""
        rows: np.ndarray = np.searchsorted(self.ends - 8, positions, side="right")
        return rows


def _odd_rows(column: _Bytes, place: int) -> np.ndarray:
    """The rows with a field of another length or with bytes that are no digits, int64, any order.

    `place` is -1 for the label, else from 0 to 38, integers first.
    """
    is_integer = 0 <= place < INTEGERS
    allowed = b"01" if place < 0 else _DIGITS + b"-" if is_integer else _HEX_DIGITS
    longest = 1 if place < 0 else _LONGEST_INTEGER if is_integer else _LONGEST_CATEGORY
    odd = []
    if column.lengths.max() > longest or (place < 0 and column.lengths.min() < 1):
        odd.append(np.flatnonzero((column.lengths > longest) | (place < 0) & (column.lengths < 1)))
    bare = column.data[8:]
    if column.text.translate(None, allowed):
        others = np.flatnonzero(~np.isin(bare, np.frombuffer(allowed, np.uint8)))
        odd.append(column.rows_with(others))
    if is_integer and b"-" in column.text:
        signs = np.flatnonzero(bare == ord("-"))
        rows = column.rows_with(signs)
        lengths = column.lengths[rows]
        begins = signs == column.ends[rows] - 8 - lengths
        odd.append(rows[~begins | (lengths == 1)])
    return np.concatenate(odd) if odd else _NONE


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

"""CSV and TSV files: a line is a row, and every malformed line is named."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ecrm.base.errors import DataError
from ecrm.data.columns.arrow import pyarrow
from ecrm.data.columns.block import Block, check_names
from ecrm.data.columns.schema import Column, Schema
from ecrm.data.malformed import Malformed
from ecrm.data.text_file import CountedFile, decoded

BLOCK_BYTES = 4 << 20
LONGEST_LINE = 16 << 20
csv.field_size_limit(LONGEST_LINE + BLOCK_BYTES)
DELIMITERS = ("\t", ",", ";", "|")
"""Separators of fields tried for a draft, in this order."""
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?")
_COUNT_ADVICE = (
    "give the header and the rows the same number of columns, or type delimiter = above [columns]"
)
_FEED, _RETURN = b"\n", b"\r"


@dataclass(frozen=True)
class TextPiece:
    """Some `lines` of a text file, each with a line feed; the first has number `first_line`.

    `names` are the file's columns. `read` maps the names of the columns to read to whether all
    fields are expected to be numbers.
    """

    path: str
    text: bytes
    first_line: int
    lines: int
    bytes_read: int
    names: list[str]
    read: dict[str, bool]
    delimiter: str

    def block(self) -> Block:
        """Parse the lines. Fields are texts, or numbers if all are; an empty field is null.

        Lines with a wrong number of fields, an open quote, a carriage return or bytes outside UTF-8
        are malformed. Blank lines are skipped.
        """
        text = self.text
        malformed: list[Malformed] = []
        numbers = np.arange(self.first_line, self.first_line + self.lines)
        parsed = self._parse(text) if _is_plain(text) else None
        if parsed is None or parsed[0].num_rows + len(parsed[1]) != len(numbers):
            text, numbers, malformed = self._without_odd_lines()
            parsed = self._parse(text)
        rows, wrong = parsed
        if rows.num_rows + len(wrong) != len(numbers):
            raise DataError(f"{self._place}: not a row of fields on every line")
        for row in wrong:
            reason = f"{row.actual_columns} columns instead of {row.expected_columns}"
            malformed.append(
                Malformed(self.path, int(numbers[row.number - 1]), reason, _COUNT_ADVICE)
            )
        numbers = np.delete(numbers, [row.number - 1 for row in wrong])
        return Block(self.path, rows, numbers, self.bytes_read, "line", malformed)

    @property
    def _place(self) -> str:
        last = self.first_line + self.lines - 1
        return f"{self.path}: lines {self.first_line} to {last}"

    def _parse(self, text: bytes) -> tuple[Any, list[Any]]:
        """The rows as a pyarrow.RecordBatch, and pyarrow's notes of unfit lines."""
        try:
            return self._parse_as(text, pyarrow.float64())
        except pyarrow.ArrowInvalid:  # a text among the numbers
            pass
        try:
            return self._parse_as(text, pyarrow.string())
        except pyarrow.ArrowException as error:
            raise DataError(f"{self._place}: {error}") from error

    def _parse_as(self, text: bytes, number: Any) -> tuple[Any, list[Any]]:
        """The same with fields expected to be numbers as the type `number`."""
        wrong: list[Any] = []

        def skip(row: Any) -> str:
            wrong.append(row)
            return "skip"

        types = {
            name: number if is_number else pyarrow.string() for name, is_number in self.read.items()
        }
        if not text.strip(b"\r\n"):
            return pyarrow.RecordBatch.from_pylist([], pyarrow.schema(types)), wrong
        table = pyarrow.csv.read_csv(
            pyarrow.py_buffer(text),
            pyarrow.csv.ReadOptions(
                use_threads=False, block_size=len(text) + 1, column_names=self.names
            ),
            pyarrow.csv.ParseOptions(delimiter=self.delimiter, invalid_row_handler=skip),
            pyarrow.csv.ConvertOptions(
                check_utf8=False,
                column_types=types,
                include_columns=list(self.read),
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
        (batch,) = table.combine_chunks().to_batches() or [
            pyarrow.RecordBatch.from_pylist([], table.schema)
        ]
        return batch, wrong

    def _without_odd_lines(self) -> tuple[bytes, np.ndarray, list[Malformed]]:
        """The lines that pyarrow takes as a row each, their numbers, and the malformed lines."""
        kept, numbers, malformed = [], [], []
        for number, line in enumerate(self.text.split(_FEED)[:-1], self.first_line):
            line = line.removesuffix(_RETURN)
            if not line:
                continue
            if reason := _oddity(line, self.delimiter):
                malformed.append(Malformed(self.path, number, reason))
            else:
                kept.append(line + _FEED)
                numbers.append(number)
        return b"".join(kept), np.array(numbers, np.int64), malformed


def text_pieces(path: str, schema: Schema, block_bytes: int = BLOCK_BYTES) -> Iterator[TextPiece]:
    """Yield the pieces of a text file, plain or gzip.

    Raises DataError for a file without lines, a damaged file, and a header with columns missing,
    doubled or unknown to the schema.
    """
    names: list[str] = []
    read = {column.name: _is_number(column) for column in schema.read}
    with CountedFile(path) as source:
        for text, line, lines in _whole_lines(source, path, block_bytes):
            if not names:
                skipped, first = _first_line(text)
                if first is None:
                    continue
                line_text = (
                    _text(path, first) if schema.header else first.decode("utf-8", "replace")
                )
                delimiter = schema.delimiter or delimiter_of(line_text)
                fields = _fields(path, line_text, delimiter)
                if schema.header:
                    check_names(path, fields, schema)
                    names = fields
                    before = text[:skipped].count(_FEED)
                    text, line, lines = text[skipped:], line + before, lines - before
                else:
                    names = [column.name for column in schema.columns]
                    if len(fields) != len(names):
                        raise DataError(
                            f"{path}: the first line has {len(fields)} columns, and "
                            f"{schema.source} has {len(names)}: correct the schema, or type "
                            "delimiter = for another separator of columns"
                        )
            yield TextPiece(path, text, line, lines, source.count, names, read, delimiter)
    if not names:
        raise DataError(f"{path}: holds no line that is not blank")


def header_of(path: str) -> tuple[list[str], str, bool]:
    """The names of a text file's columns, the delimiter, and whether the first line is a header.

    The delimiter is the first of `DELIMITERS` that divides the first line, and "" if a schema need
    not name the delimiter. The first line is a header if no field is a number. Without a header the
    names are `column_0`, `column_1` and so on.
    """
    with CountedFile(path) as source:
        for text, *_ in _whole_lines(source, path, BLOCK_BYTES):
            _, first = _first_line(text)
            if first is not None:
                line = _text(path, first)
                usual = delimiter_of(line)
                divided = {one: _fields(path, line, one) for one in (usual, *DELIMITERS)}
                delimiter = next((one for one in divided if len(divided[one]) > 1), usual)
                fields, delimiter = divided[delimiter], "" if delimiter == usual else delimiter
                if all(_NUMBER.fullmatch(field) is None for field in fields):
                    return fields, delimiter, True
                return [f"column_{place}" for place in range(len(fields))], delimiter, False
    raise DataError(f"{path}: holds no line that is not blank")


def _is_number(column: Column) -> bool:
    return column.kind == "dense" or (column.kind == "label" and column.equals is None)


def delimiter_of(line: str) -> str:
    """The separator of the fields of a line: a tab if there is one, else a comma."""
    return "\t" if "\t" in line else ","


def _fields(path: str, line: str, delimiter: str) -> list[str]:
    """The fields of the first line. Raises DataError for a line that csv cannot divide, or JSON."""
    if line.startswith("{") and line.rstrip().endswith(("{", "}")):
        raise DataError(f"{path}: JSON lines are not read: write Parquet, Arrow or CSV")
    try:
        return next(csv.reader([line], delimiter=delimiter))
    except csv.Error:
        raise DataError(
            f"{path}: not a text file of columns, or lines end in CR: "
            f"type tr '\\r' '\\n' < {path} > NEW"
        ) from None


def _text(path: str, line: bytes) -> str:
    """The text of the first line. Raises DataError for a line that is not UTF-8."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: the first line is not UTF-8 at byte {error.start + 1}: "
            f"for Latin-1 type iconv -f LATIN1 -t UTF-8 < {path} > NEW"
        ) from None


def _first_line(text: bytes) -> tuple[int, bytes | None]:
    """The first line not blank, and the bytes up to its end; None if all are blank."""
    end = 0
    while end < len(text):
        start, end = end, text.index(_FEED, end) + 1
        line = text[start:end].rstrip(b"\r\n")
        if line:
            return end, line
    return end, None


def _whole_lines(
    source: CountedFile, path: str, block_bytes: int
) -> Iterator[tuple[bytes, int, int]]:
    """Yield texts of whole lines, each with a line feed, the first line's number, and the lines."""
    number, carried = 1, b""
    for data in decoded(source, path, block_bytes):
        if number == 1 and not carried and b"\0" in data:
            raise DataError(
                f"{path}: has a NUL byte, so the file is no text: name files of Parquet, "
                "Arrow, CSV or TSV"
            )
        end = data.rfind(_FEED) + 1
        if end:
            lines = int(np.count_nonzero(np.frombuffer(data, np.uint8) == _FEED[0]))
            yield b"".join((carried, memoryview(data)[:end])), number, lines
            number += lines
            carried = data[end:]
        else:
            carried += data
            if len(carried) > LONGEST_LINE:
                raise DataError(
                    f"{path}:{number}: the line does not end within {len(carried)} bytes"
                )
    if carried:
        yield carried + _FEED, number, 1


def _is_plain(text: bytes) -> bool:
    """Whether lines are UTF-8, and none has a carriage return inside.

    Then no line gives two rows. So blank lines and open quotes show as a lack of rows.
    """
    if _RETURN in text and text.count(_RETURN) != text.count(b"\r\n"):
        return False
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError:
            return False
    return True


def _oddity(line: bytes, delimiter: str) -> str:
    """The reason why a line without its end is no row of fields, "" for a row."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return f"not valid UTF-8 at byte {error.start + 1} of the line"
    if "\r" in text:
        return "a carriage return inside the line"
    reader = csv.reader([text, ""], delimiter=delimiter)
    next(reader)
    return "a quote is not closed on the line" if reader.line_num > 1 else ""

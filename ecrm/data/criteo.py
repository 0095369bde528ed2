"""Reading Criteo click logs in bounded memory: Kaggle, Terabyte or csv with a header.

Kaggle's file is `train.txt`, Terabyte's are `day_N`. Files are plain text or gzip.

A line is a label (0 or 1), 13 integers and 26 categories of up to 8 hex digits; an empty integer or
category is a missing value. csv writers like pandas spell fields differently. Under a header,
fields may be in double quotes, the label and integers may end in a point and zeros (`260.0`), and
`nan`, `null` or `none`, in any case, is a missing value too. Lines end in LF or CRLF; the last line
may lack a line end; blank lines are skipped. Any further line is malformed: skipped and counted, or
fatal with `strict`.

Legend: R well-formed rows of one block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ecrm.base.errors import DataError
from ecrm.data.criteo_fields import Fields, fields_of
from ecrm.data.layout import COLUMN_NAMES, LineLayout, detect_layout
from ecrm.data.malformed import Malformed
from ecrm.data.text_file import CountedFile, check_input, decoded

BLOCK_BYTES = 2 << 20
# 40 sound fields need 481; the bound keeps memory constant in a file without line ends
MAX_LINE_BYTES = 1 << 16
MAX_DIGITS = 18  # the most decimal digits sure to fit in an int64
MAX_FRACTION_ZEROS = 8
MISSING_WORDS = (b"nan", b"null", b"none")  # in any case


@dataclass(frozen=True)
class Rows:
    """The rows of a block of a file, in file order.

    `labels` uint8 [R] in {0, 1}; `integers` int64 [R, 13]; `categories` uint32 [R, 26]; `missing`
    bool [R, 39], integers first; a missing value is 0. `bad` describes the malformed lines of the
    block. `bytes_read` counts the bytes read from the file up to now, compressed bytes for a gzip
    file.
    """

    labels: np.ndarray
    integers: np.ndarray
    categories: np.ndarray
    missing: np.ndarray
    bad: list[Malformed]
    bytes_read: int
    unit: ClassVar[str] = "line"

    @property
    def malformed(self) -> int:
        """The number of malformed lines."""
        return len(self.bad)

    @property
    def examples(self) -> Iterator[Malformed]:
        """A description of every malformed line."""
        return iter(self.bad)


@dataclass(frozen=True)
class Piece:
    """Some `lines` of a file, each with a line feed; the first has number `first_line`."""

    path: str
    text: bytes
    first_line: int
    lines: int
    layout: LineLayout
    bytes_read: int

    def rows(self) -> Rows:
        """Parse the lines; to be called on any thread."""
        bad: list[Malformed] = []
        fields, doubtful = Fields.of_rows([]), np.zeros(0, np.int64)
        if plain := _are_plain(self.text, self.layout):
            fields, doubtful = fields_of(self.text, self.layout)
            plain = len(fields.labels) + len(doubtful) == self.lines  # else a line is blank
        if not plain or len(doubtful):
            lines = [line.removesuffix(b"\r") for line in self.text.split(b"\n")[:-1]]
            numbers = np.flatnonzero([bool(line) for line in lines])
            if not plain:
                filled = [lines[number] + b"\n" for number in numbers]
                fit = np.array([_are_plain(line, self.layout) for line in filled], bool)
                text = b"".join(line for line, one in zip(filled, fit) if one)
                fields, doubtful = fields_of(text, self.layout)
                doubtful = np.union1d(np.flatnonzero(~fit), np.flatnonzero(fit)[doubtful])
            judged = [lines[number] for number in numbers[doubtful]]
            fields = self._with_judged(fields, judged, numbers[doubtful], doubtful, bad)
        return Rows(
            fields.labels,
            fields.integers,
            fields.categories,
            fields.missing,
            bad,
            self.bytes_read,
        )

    def _with_judged(
        self,
        fields: Fields,
        lines: Sequence[bytes],
        numbers: np.ndarray,
        places: np.ndarray,
        bad: list[Malformed],
    ) -> Fields:
        """The fields with those of `lines`, judged one by one; malformed lines go to `bad`.

        `numbers` are the places of the lines in the text, `places` those among lines not blank.
        """
        rows, kept = [], []
        for line, number, place in zip(lines, numbers.tolist(), places.tolist(), strict=True):
            reason = why_malformed(line, self.layout)
            if reason:
                bad.append(Malformed(self.path, self.first_line + number, reason))
            else:
                rows.append(row_of(line, self.layout))
                kept.append(place - len(bad))
        return fields.with_rows(Fields.of_rows(rows), np.array(kept, np.int64))


def _are_plain(text: bytes, layout: LineLayout) -> bool:
    """Whether lines, each with a line feed, are fit for `fields_of`, if none is blank."""
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError:
            return False
    if b"\r" in text and text.count(b"\r") != text.count(b"\r\n"):
        return False
    if layout.columns == len(COLUMN_NAMES):
        return True  # in a longer line a field is too long
    feeds = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
    return bool(np.diff(feeds, prepend=-1).max(initial=0) <= MAX_LINE_BYTES + 1)


def read_criteo(
    path: str, *, strict: bool = False, block_bytes: int = BLOCK_BYTES
) -> Iterator[Rows]:
    """Yield the rows of a file block by block; a block may have no rows.

    Memory does not grow with the file: about ten times `block_bytes`. All blocks together do not
    depend on `block_bytes`. Raises `UsageError` for an unreadable file, `DataError` for a file
    empty, damaged, truncated or in a foreign format (all compression but gzip), for a header that
    lacks or repeats columns and, with `strict`, for the first malformed line as `FILE:LINE:
    reason`.
    """
    for piece in pieces(path, block_bytes):
        rows = piece.rows()
        if strict and rows.bad:
            raise DataError(str(rows.bad[0]))
        yield rows


def pieces(path: str, block_bytes: int = BLOCK_BYTES) -> Iterator[Piece]:
    """Yield the lines of a file in pieces, without the header. Raises as `read_criteo`."""
    check_input(path)
    layout = None
    with CountedFile(path) as source:
        for text, number, lines in _whole_lines(source, path, block_bytes):
            if layout is None:
                skipped = len(text) - len(text.lstrip(b"\r\n"))
                if skipped == len(text):
                    continue
                blank = text[:skipped].count(b"\n")
                text, number, lines = text[skipped:], number + blank, lines - blank
                end = text.index(b"\n") + 1
                layout = detect_layout(path, number, text[: end - 1].removesuffix(b"\r"))
                if layout.header:
                    text, number, lines = text[end:], number + 1, lines - 1
            yield Piece(path, text, number, lines, layout, source.count)
    if layout is None:
        raise DataError(f"{path}: holds no line that is not blank")


def _whole_lines(
    source: CountedFile, path: str, block_bytes: int
) -> Iterator[tuple[bytes, int, int]]:
    """Yield texts of whole lines: the text, the number of the first line, the number of lines.

    Every line ends in LF.
    """
    number, carried = 1, b""
    for data in decoded(source, path, block_bytes):
        end = data.rfind(b"\n") + 1
        if end:
            lines = int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n")))
            yield b"".join((carried, memoryview(data)[:end])), number, lines
            number += lines
            carried = data[end:]
        else:
            # The kept start of an overlong line is still longer than MAX_LINE_BYTES.
            carried = (carried + data)[: MAX_LINE_BYTES + 1]
    if carried:
        yield carried + b"\n", number, 1


_INTEGER = re.compile(rb"-?[0-9]+")
_ZERO_FRACTION = re.compile(rb"(?<=[0-9])\.0{0,%d}\Z" % MAX_FRACTION_ZEROS)
_HEX = re.compile(rb"[0-9a-fA-F]+")


def why_malformed(line: bytes, layout: LineLayout) -> str:
    """Return the reason why a line, without the line end, is not a row, "" for a row.

    The function is the plain statement of the format accepted by the reader.
    """
    if len(line) > MAX_LINE_BYTES:
        return f"the line is longer than {MAX_LINE_BYTES} bytes"
    texts = line.split(layout.delimiter)
    if len(texts) != layout.columns:
        return _not_unicode(line) or f"{len(texts)} columns instead of {layout.columns}"
    for name, position in zip(COLUMN_NAMES, layout.order, strict=True):
        text = _unquoted(texts[position]) if layout.header else texts[position]
        problem = _field_problem(name, _as_without_header(name, text) if layout.header else text)
        if problem:
            return _not_unicode(line) or f"{name} is {_shown(text)}, {problem}"
    return ""


def row_of(line: bytes, layout: LineLayout) -> list[int | None]:
    """Return the values of a line that is a row, in the order of `COLUMN_NAMES`; None if missing.

    The function is the plain statement of the values read by the reader.
    """
    texts = line.split(layout.delimiter)
    values: list[int | None] = []
    for name, position in zip(COLUMN_NAMES, layout.order, strict=True):
        text = texts[position]
        if layout.header:
            text = _as_without_header(name, _unquoted(text))
        values.append(int(text, 16 if name.startswith("cat_") else 10) if text else None)
    return values


def _unquoted(text: bytes) -> bytes:
    """Return the text inside double quotes left by some csv writers."""
    quoted = len(text) >= 2 and text.startswith(b'"') and text.endswith(b'"')
    return text[1:-1] if quoted else text


def _as_without_header(name: str, text: bytes) -> bytes:
    """Return a field under a header in the spelling of files without a header.

    A fraction of zeros is dropped, and a word for a missing value becomes "".
    """
    if not name.startswith("cat_"):
        text = _ZERO_FRACTION.sub(b"", text)
    return b"" if name != "label" and text.lower() in MISSING_WORDS else text


def _field_problem(name: str, text: bytes) -> str:
    """Return the problem with a field's text, "" without a problem."""
    if name == "label":
        return "" if text in (b"0", b"1") else "not 0 or 1"
    if not text:
        return ""
    if name.startswith("int_"):
        if not _INTEGER.fullmatch(text):
            return "not an integer"
        return "" if len(text.lstrip(b"-")) <= MAX_DIGITS else f"more than {MAX_DIGITS} digits"
    if not _HEX.fullmatch(text):
        return "not hexadecimal"
    return "" if len(text) <= 8 else "more than 8 hex digits"


def _not_unicode(line: bytes) -> str:
    """Return the reason if the line is not UTF-8, else ""."""
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"not valid UTF-8 at byte {error.start + 1} of the line"
    return ""


def _shown(text: bytes) -> str:
    """Return a field's text quoted for a message, cut to a readable length."""
    decoded = text.decode("utf-8", "replace")
    return repr(decoded if len(decoded) <= 40 else decoded[:40] + "...")

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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ecrm.base.errors import DataError
from ecrm.data import parse_fields
from ecrm.data.layout import COLUMN_NAMES, COLUMNS, INTEGERS, LineLayout, detect_layout
from ecrm.data.malformed import Malformed
from ecrm.data.text_file import CountedFile, check_input, decoded

BLOCK_BYTES = 1 << 20
# 40 sound fields need 481; the bound keeps memory constant in a file without line ends
MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class Rows:
    """The rows of a block of a file, in file order.

    `labels` uint8 [R] in {0, 1}; `integers` int64 [R, 13]; `categories` uint32 [R, 26]; `missing`
    bool [R, 39], integers first; a missing value is 0. `malformed` counts the malformed lines of
    the block. `examples` yields a description of every malformed line, and can be read once.
    `bytes_read` counts the bytes read from the file up to now, compressed bytes for a gzip file.
    """

    labels: np.ndarray
    integers: np.ndarray
    categories: np.ndarray
    missing: np.ndarray
    malformed: int
    examples: Iterator[Malformed]
    bytes_read: int
    unit: ClassVar[str] = "line"


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
    check_input(path)
    layout = None
    with CountedFile(path) as source:
        for text, first_line in _whole_lines(source, path, block_bytes):
            block = np.frombuffer(text, np.uint8)
            starts, ends = _line_bounds(block)
            numbers = np.arange(first_line, first_line + len(starts))
            filled = ends > starts
            starts, ends, numbers = starts[filled], ends[filled], numbers[filled]
            if layout is None:
                if not len(starts):
                    continue
                layout = detect_layout(path, int(numbers[0]), bytes(text[starts[0] : ends[0]]))
                if layout.header:
                    starts, ends, numbers = starts[1:], ends[1:], numbers[1:]
            rows = _parse_block(path, block, starts, ends, numbers, layout, source.count)
            if strict and rows.malformed:
                raise DataError(str(next(rows.examples)))
            yield rows
    if layout is None:
        raise DataError(f"{path}: holds no line that is not blank")


def _whole_lines(source: CountedFile, path: str, block_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield texts of whole lines, as (text, number of the first line).

    Every line ends in LF. The text has `parse_fields.PAD` spare bytes on either side.
    """
    pad = bytes(parse_fields.PAD)
    line_number, carried = 1, b""
    for data in decoded(source, path, block_bytes):
        end = data.rfind(b"\n") + 1
        if end:
            yield b"".join((pad, carried, data[:end], pad)), line_number
            line_number += data.count(b"\n")
            carried = data[end:]
        else:
            # The kept start of an overlong line is still longer than MAX_LINE_BYTES.
            carried = (carried + data)[: MAX_LINE_BYTES + 1]
    if carried:
        yield b"".join((pad, carried, b"\n", pad)), line_number


def _line_bounds(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the int64 offsets of the first byte of every line and of the end of every line.

    The end is the offset behind the last byte; LF or CRLF is left out.
    """
    feeds = np.flatnonzero(block == ord("\n"))
    starts = np.concatenate(([parse_fields.PAD], feeds[:-1] + 1))
    # The byte before an empty line belongs to the previous line.
    returned = (block[feeds - 1] == ord("\r")) & (feeds > starts)
    return starts, feeds - returned


def _parse_block(
    path: str,
    block: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    numbers: np.ndarray,
    layout: LineLayout,
    bytes_read: int,
) -> Rows:
    """Parse the lines between `starts` and `ends`; no line is blank."""
    separators = np.flatnonzero(block == ord(layout.delimiter))
    first = np.searchsorted(separators, starts)
    whole = (np.searchsorted(separators, ends) - first == layout.columns - 1) & (
        ends - starts <= MAX_LINE_BYTES
    )
    inner = separators[first[whole, None] + np.arange(layout.columns - 1)]
    order = np.array(layout.order)
    field_starts = np.concatenate((starts[whole, None], inner + 1), axis=1).take(order, axis=1)
    field_ends = np.concatenate((inner, ends[whole, None]), axis=1).take(order, axis=1)
    if layout.header:
        field_starts, field_ends = _unquote(block, field_starts, field_ends)
    lengths = field_ends - field_starts
    if layout.header:
        span = slice(0, 1 + INTEGERS)
        lengths[:, span] = parse_fields.without_zero_fraction(
            block, field_starts[:, span], lengths[:, span]
        )
        lengths[:, 1:] = parse_fields.without_missing_words(
            block, field_starts[:, 1:], lengths[:, 1:]
        )

    label_bytes = block[field_starts[:, 0]]
    good = (lengths[:, 0] == 1) & ((label_bytes == ord("0")) | (label_bytes == ord("1")))
    span = slice(1, 1 + INTEGERS)
    integers, sound = parse_fields.parse_decimal(block, field_starts[:, span], lengths[:, span])
    good &= sound.all(axis=1)
    span = slice(1 + INTEGERS, COLUMNS)
    categories, sound = parse_fields.parse_hex(block, field_starts[:, span], lengths[:, span])
    good &= sound.all(axis=1)
    labels, missing = label_bytes - np.uint8(ord("0")), lengths[:, 1:] == 0

    malformed = len(starts) - int(good.sum())
    examples: Iterator[Malformed] = iter(())
    if malformed:
        bad = np.ones(len(starts), bool)
        bad[np.flatnonzero(whole)[good]] = False
        examples = (
            Malformed(
                path,
                int(numbers[line]),
                why_malformed(bytes(block[starts[line] : ends[line]]), layout),
            )
            for line in np.flatnonzero(bad)
        )
        labels, integers, categories, missing = (
            array[good] for array in (labels, integers, categories, missing)
        )
    return Rows(labels, integers, categories, missing, malformed, examples, bytes_read)


def _unquote(
    block: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Narrow the fields to the text inside the double quotes left by some csv writers."""
    quoted = (ends - starts >= 2) & (block[starts] == ord('"')) & (block[ends - 1] == ord('"'))
    return starts + quoted, ends - quoted


_INTEGER = re.compile(rb"-?[0-9]+")
_ZERO_FRACTION = re.compile(rb"(?<=[0-9])\.0{0,%d}\Z" % parse_fields.MAX_FRACTION_ZEROS)
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
        text = texts[position]
        if layout.header and len(text) >= 2 and text.startswith(b'"') and text.endswith(b'"'):
            text = text[1:-1]
        problem = _field_problem(name, _as_without_header(name, text) if layout.header else text)
        if problem:
            return _not_unicode(line) or f"{name} is {_shown(text)}, {problem}"
    return ""


def _as_without_header(name: str, text: bytes) -> bytes:
    """Return a field under a header in the spelling of files without a header.

    A fraction of zeros is dropped, and a word for a missing value becomes "".
    """
    if not name.startswith("cat_"):
        text = _ZERO_FRACTION.sub(b"", text)
    return b"" if name != "label" and text.lower() in parse_fields.MISSING_WORDS else text


def _field_problem(name: str, text: bytes) -> str:
    """Return the problem with a field's text, "" without a problem."""
    if name == "label":
        return "" if text in (b"0", b"1") else "not 0 or 1"
    if not text:
        return ""
    if name.startswith("int_"):
        if not _INTEGER.fullmatch(text):
            return "not an integer"
        return (
            ""
            if len(text.lstrip(b"-")) <= parse_fields.MAX_DIGITS
            else f"more than {parse_fields.MAX_DIGITS} digits"
        )
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

"""The column order of a Criteo text file: the published order, or a header line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ecrm.base.errors import DataError

INTEGERS = 13
CATEGORIES = 26
COLUMNS = 1 + INTEGERS + CATEGORIES
COLUMN_NAMES = (
    "label",
    *(f"int_{i}" for i in range(INTEGERS)),
    *(f"cat_{i}" for i in range(CATEGORIES)),
)

_LABEL_NAMES = {"label", "labels", "click", "clicked", "target"}
# I1..I13 and C1..C26 count from one, int_0..int_12 and cat_0..cat_25 from zero.
_NUMBERED = re.compile(r"(i|c)([1-9][0-9]?)|(int|cat)_([0-9]{1,2})")


@dataclass(frozen=True)
class LineLayout:
    """The division of a line: `order[i]` is the position in the line of `COLUMN_NAMES[i]`."""

    delimiter: bytes
    columns: int
    order: tuple[int, ...]
    header: bool


def _index(name: str) -> int | None:
    """Return the position of a header name in `COLUMN_NAMES`, `None` for an unknown name."""
    name = name.strip().strip('"').lower()
    if name in _LABEL_NAMES:
        return 0
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return None
    letter, from_one, word, from_zero = match.groups()
    number = int(from_one) - 1 if letter else int(from_zero)
    first, count = (1, INTEGERS) if (letter or word)[0] == "i" else (1 + INTEGERS, CATEGORIES)
    return first + number if number < count else None


OTHER_COLUMNS = (
    "for a file of other columns type ecrm schema FILE > schema.toml, then "
    "ecrm prepare table FILE --schema schema.toml --output DIR"
)


def detect_layout(path: str, number: int, line: bytes) -> LineLayout:
    """Return the layout of a file, read from the first line with text.

    `line` is line `number` of the file, without the line end. The line is a header if a name in the
    line belongs to the label or an integer column: `c1` to `c26` alone could be hex values. Headers
    may order the 40 columns freely and have further columns, never read. Without a header the order
    is `COLUMN_NAMES`, separated by tabs, or by commas if the line has no tab and exactly 39 commas.
    Raises `DataError` for a header with a column missing or named twice, and for a line with commas
    that is neither a header nor a row.
    """
    delimiter = b"," if b"\t" not in line and b"," in line else b"\t"
    found: dict[int, int] = {}
    names = line.decode("utf-8", "replace").split(delimiter.decode())
    indices = [_index(name) for name in names]
    if not any(index is not None and index <= INTEGERS for index in indices):
        if delimiter == b"," and len(names) != COLUMNS:
            raise DataError(
                f"{path}:{number}: {len(names)} fields between commas, and no header of Criteo's "
                f"{COLUMNS} columns; {OTHER_COLUMNS}"
            )
        return LineLayout(delimiter, COLUMNS, tuple(range(COLUMNS)), header=False)
    for position, index in enumerate(indices):
        if index is None:
            continue
        if index in found:
            raise DataError(
                f"{path}:{number}: the header names {COLUMN_NAMES[index]} twice: "
                f"{names[found[index]]!r}, {names[position]!r}"
            )
        found[index] = position
    missing = [name for index, name in enumerate(COLUMN_NAMES) if index not in found]
    if missing:
        raise DataError(
            f"{path}:{number}: the header lacks {len(missing)} of {COLUMNS} columns: "
            f"{', '.join(missing)}; {OTHER_COLUMNS}"
        )
    return LineLayout(
        delimiter, len(names), tuple(found[index] for index in range(COLUMNS)), header=True
    )

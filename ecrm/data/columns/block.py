"""The rows of a file that are converted together, and the pieces before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ecrm.base.errors import DataError
from ecrm.data.columns.schema import Column, Schema
from ecrm.data.columns.values import shown
from ecrm.data.malformed import Malformed


@dataclass(frozen=True)
class Block:
    """R rows of a file: Arrow columns, and the place of every row.

    `columns` is a pyarrow.RecordBatch of the columns to read, in the order of the schema. `numbers`
    int64 [R] are the rows' places, counted from 1: lines of a text file, else rows. `malformed` are
    lines of the file unfit for a row. `bytes_read` counts the bytes of the file up to here.
    """

    path: str
    columns: Any
    numbers: np.ndarray
    bytes_read: int
    unit: str = "row"
    malformed: list[Malformed] = field(default_factory=list)


class Piece(Protocol):
    """A part of a file, turned into a block on any thread."""

    def block(self) -> Block: ...


@dataclass(frozen=True)
class ReadBlock:
    """A piece already read."""

    read: Block

    def block(self) -> Block:
        return self.read


def check_doubled(path: str, names: list[str]) -> None:
    """Raise DataError naming the columns of a file with the same name."""
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise DataError(f"{path}: several columns have the name {', '.join(map(shown, doubled))}")


def check_names(path: str, names: list[str], schema: Schema) -> None:
    """Raise DataError naming the columns missing in a file, unknown to the schema, or doubled."""
    check_doubled(path, names)
    wanted = [column.name for column in schema.columns]
    missing = [name for name in wanted if name not in set(names)]
    new = [name for name in names if name not in set(wanted)]
    found = []
    if missing:
        found.append(f"lacks {_columns(missing)} of {schema.source}")
    if new:
        found.append(f"has {_columns(new)}, unknown to {schema.source}")
    if found:
        advice = ["correct the names in the file or the schema"]
        advice += ['type kind = "unused" for a column not to read'] if new else []
        if len(names) == 1 and (divider := next((one for one in ";|" if one in names[0]), "")):
            advice += [f'type delimiter = "{divider}" above [columns]']
        advice += ["type header = false if the first line is a row"] if new and missing else []
        raise DataError(f"{path} {' and '.join(found)}: {', or '.join(advice)}")


def mistyped(path: str, column: Column, found: str, wanted: str) -> DataError:
    """The error for a column of the wrong type in a file."""
    return DataError(
        f"{path}: column {column.name!r} holds {found}, and a column of kind {column.kind} needs "
        f"{wanted}: correct the file, or the kind in the schema"
    )


def _columns(names: list[str]) -> str:
    """Columns by name, at most eight."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    noun = "column" if len(names) == 1 else "columns"
    return f"{noun} {', '.join(map(shown, names[:8]))}{more}"

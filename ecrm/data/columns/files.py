"""Files of columns in pieces: Parquet, Arrow, CSV and TSV, told apart by their first bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ecrm.base.errors import DataError
from ecrm.data.columns.arrow import pyarrow
from ecrm.data.columns.block import Block, Piece, ReadBlock, check_names
from ecrm.data.columns.schema import Schema
from ecrm.data.columns.text_lines import text_pieces
from ecrm.data.text_file import check_input

BLOCK_ROWS = 1 << 15
_STREAM = b"\xff\xff\xff\xff"


def format_of(path: str) -> str:
    """The format of a file by its first bytes: "parquet", "arrow", "stream" or "text".

    Raises UsageError for an unreadable file, DataError for an empty file.
    """
    if check_input(path) is None:
        return "text"  # a pipe: no byte may be taken out
    with open(path, "rb") as file:
        start = file.read(6)
    if start.startswith(b"PAR1"):
        return "parquet"
    if start == b"ARROW1":
        return "arrow"
    return "stream" if start.startswith(_STREAM) else "text"


def pieces(path: str, schema: Schema) -> Iterator[Piece]:
    """Yield the pieces of a file in order.

    Raises DataError for a damaged file, and for columns missing, doubled or unknown to the schema.
    """
    form = format_of(path)
    if form == "text":
        yield from text_pieces(path, schema)
        return
    read = [column.name for column in schema.read]
    with arrow_errors(path), open_batches(path, form, read) as (found, batches, total):
        check_names(path, found.names, schema)
        size, done = os.path.getsize(path), 0
        for batch in batches:
            rows, first = batch.select(read), done
            done += rows.num_rows
            numbers = np.arange(first + 1, done + 1)
            yield ReadBlock(Block(path, rows, numbers, size * done // max(total or done, 1)))


@contextmanager
def open_batches(
    path: str, form: str, read: list[str] | None
) -> Iterator[tuple[Any, Iterator[Any], int | None]]:
    """A Parquet or Arrow file: the schema, the batches, and the number of rows if known.

    The batches have at least the columns `read` of the file, by default all, and at most BLOCK_ROWS
    rows each.
    """
    if form == "parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            # a dot in a name means a part of a nested column to pyarrow
            dotted = read is None or any("." in name for name in names)
            some = None if dotted else [name for name in names if name in set(read or [])]
            yield (
                file.schema_arrow,
                file.iter_batches(BLOCK_ROWS, columns=some),
                (file.metadata.num_rows),
            )
        return
    with pyarrow.memory_map(path) as source:
        if form == "arrow":
            reader = pyarrow.ipc.open_file(source)
            whole = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            reader = pyarrow.ipc.open_stream(source)
            whole = iter(reader)
        yield reader.schema, _sliced(whole), None


def _sliced(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        for start in range(0, batch.num_rows, BLOCK_ROWS):
            yield batch.slice(start, BLOCK_ROWS)


@contextmanager
def arrow_errors(path: str) -> Iterator[None]:
    """Turn an error of pyarrow into one line about the file."""
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        first = str(error).split("\n")[0]
        raise DataError(f"{path}: cannot be read as Parquet or Arrow: {first}") from error

"""Files of columns to the memory-mapped files of a table, by a schema.

The files are read in order and converted on several threads. The bits do not depend on threads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from ecrm.base.atomic_files import staged_directory
from ecrm.base.console import Progress
from ecrm.base.errors import DataError, UsageError
from ecrm.data import dataset_info
from ecrm.data.columns import manifest as info
from ecrm.data.columns.arrow import pyarrow
from ecrm.data.columns.block import Piece
from ecrm.data.columns.convert import Converted, convert
from ecrm.data.columns.files import pieces
from ecrm.data.columns.schema import Schema
from ecrm.data.columns.times import Clock
from ecrm.data.columns.writer import Writer
from ecrm.data.copying import Threads, copy_rows
from ecrm.data.malformed import Skipped, check_share
from ecrm.data.output import check_replaceable, write_synced
from ecrm.data.text_file import check_inputs


def prepare_table(
    inputs: Sequence[str],
    output_dir: str,
    schema: Schema,
    max_malformed: float = dataset_info.MAX_MALFORMED,
    strict: bool = False,
    force: bool = False,
    vocabularies: Path | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the rows of files as a prepared table, and return the manifest.

    The files may be Parquet, Arrow, CSV and TSV, each by its first bytes. A row with a malformed
    value is skipped, counted and named in `malformed.txt`. A file is refused if more than the share
    `max_malformed` of its rows, or of the first 100,000 or more, is malformed; with `strict` at the
    first malformed row. The folder appears once complete and on disk; before, and after a failure,
    `output_dir` is unchanged. With `force` a table prepared before is replaced. `vocabularies` is a
    prepared table: its vocabularies are used as they are, and unknown values get row 0. `threads`
    is by default the number of cores. Raises UsageError for bad arguments, unreadable inputs and an
    output not to be replaced, DataError for damaged, empty or refused inputs, EcrmError for a
    failed write.
    """
    check_share(max_malformed)
    if not inputs:
        raise UsageError("prepare needs at least one input file")
    input_bytes = check_inputs(inputs)
    known = known_values(vocabularies, schema) if vocabularies is not None else {}
    workers = Threads(threads)
    pyarrow.set_cpu_count(workers.count)
    target = Path(os.path.realpath(output_dir))
    replaceable = partial(check_replaceable, target, info.FORMAT, force)
    with staged_directory(target, replaceable) as staged:
        with ExitStack() as stack:
            writer = Writer(stack, staged, schema, known)
            skipped = Skipped(stack, staged / dataset_info.MALFORMED, progress)
            read = partial(
                _converted,
                schema=schema,
                strict=strict,
                threads=stack.enter_context(workers),
                clock=Clock(schema),
            )
            sources = copy_rows(inputs, input_bytes, read, writer, skipped, progress, max_malformed)
            skipped.finish()
            if not writer.rows:
                raise _no_row(inputs, sources, skipped)
            manifest = writer.finish() | {"sources": sources}
        write_synced(staged / info.NAME, json.dumps(manifest, indent=1).encode() + b"\n")
    return manifest


def _no_row(
    inputs: Sequence[str], sources: Sequence[dict[str, Any]], skipped: Skipped
) -> DataError:
    """The error for files without a well-formed row."""
    malformed, names = sum(source["malformed"] for source in sources), ", ".join(inputs)
    if skipped.first is None:
        return DataError(f"{names}: no rows: name a file with rows")
    return DataError(
        f"{names}: no well-formed row ({malformed:,} malformed; the first is {skipped.first})"
    )


def known_values(directory: Path, schema: Schema) -> dict[str, list[str]]:
    """The vocabularies of a prepared table, by table.

    Raises UsageError for a folder without a prepared table, and for a table of the schema without a
    vocabulary there.
    """
    _, before = info.read_manifest(directory)
    found = {}
    for table, column in schema.tables.items():
        if not column.vocabulary:
            continue
        if table not in before.tables or not before.tables[table].vocabulary:
            raise UsageError(
                f"{directory}: has no vocabulary of the table {table!r}",
                otherwise="prepare without --vocabularies, or correct the schema",
            )
        found[table] = info.values_of(directory / info.vocabulary_of(before, column))
    return found


def _converted(
    path: str, schema: Schema, strict: bool, threads: Threads, clock: Clock
) -> Iterator[Converted]:
    """Yield the converted blocks of a file in order.

    Pieces up to the first time are converted in turn: the others must agree with that time.
    """

    def work(piece: Piece) -> Converted:
        return convert(piece.block(), schema, clock)

    for converted in threads.in_order(pieces(path, schema), work, lambda: not clock.is_set):
        if strict and converted.bad:
            raise DataError(str(converted.bad[0]))
        yield converted

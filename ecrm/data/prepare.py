"""Criteo text to the memory-mapped binary dataset for training.

A dataset is a directory of `labels.bin` uint8 [N], `dense.bin` float32 [N, 13], `sparse.bin` int32
[N, 26] (all little-endian, row-major, in the order of the input), `manifest.json` and, after
malformed lines, `malformed.txt` with their places. Every row is transformed alone. So the result of
a row depends neither on the file nor on the rows around it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ecrm.base.atomic_files import staged_directory
from ecrm.base.console import Progress
from ecrm.base.errors import DataError, UsageError
from ecrm.data import dataset_info
from ecrm.data.copying import Threads, copy_rows
from ecrm.data.criteo import BLOCK_BYTES, Piece, pieces
from ecrm.data.hashing import row_ids
from ecrm.data.kaggle_shape import CARDINALITIES, TERABYTE_CARDINALITIES
from ecrm.data.layout import CATEGORIES, COLUMN_NAMES, INTEGERS
from ecrm.data.malformed import Malformed, Skipped, check_share
from ecrm.data.output import check_replaceable, write_synced
from ecrm.data.text_file import check_inputs

_DAY = re.compile(r"day_(\d+)")

DEFAULT_HASH_SIZES = tuple(
    min(2_000_000, max(1_000, 8 * max(pair)))
    for pair in zip(CARDINALITIES, TERABYTE_CARDINALITIES, strict=True)
)
"""Rows per table by default, at least 1,000 and at most 2,000,000.

Eight rows for each value, by the larger cardinality published for Kaggle or Terabyte. So about one
value in eight shares a row.
"""

_TRANSFORM = {
    "dense": "ln(max(x, -2) + 3), a missing x taken as 0",
    "sparse": "0 if missing, else 1 + splitmix64(x) mod (rows - 1), "
    "x the 32-bit value of the hex digits",
}


def prepare(
    inputs: Sequence[str],
    output_dir: str,
    hash_sizes: int | Sequence[int] | None = None,
    strict: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    block_bytes: int = BLOCK_BYTES,
    max_malformed: float = dataset_info.MAX_MALFORMED,
    threads: int | None = None,
) -> dict[str, Any]:
    """Write the rows of Criteo text files as a dataset directory, and return its manifest.

    The files are read in order. `hash_sizes` is the number of rows of all tables, or a number for
    each of the 26 tables (`None`: `DEFAULT_HASH_SIZES`), from 2 to 2^31 - 1. Malformed lines are
    skipped, counted and named in `malformed.txt`, the first 20 shown. A file is refused if more
    than the share `max_malformed` of the lines, or of the first 100,000 or more, is malformed; with
    `strict` at the first malformed line. The directory appears once complete and on disk; before,
    and after a failure, `output_dir` is unchanged. With `force` an existing dataset is replaced. An
    empty directory is always replaced, any further file or directory never. `threads` is by default
    the number of cores, and changes no bit. Raises `UsageError` for bad arguments, unreadable
    inputs and an output not to be replaced, `DataError` for damaged, empty or refused inputs,
    `EcrmError` for a failed write.
    """
    check_share(max_malformed)
    sizes = check_hash_sizes(hash_sizes)
    if not inputs:
        raise UsageError("prepare needs at least one input file")
    input_bytes = check_inputs(inputs)
    workers = Threads(threads)
    target = Path(os.path.realpath(output_dir))
    if progress and (warning := order_warning(inputs)):
        progress.note(f"ecrm: warning: {warning}")
    with staged_directory(
        target, lambda: check_replaceable(target, dataset_info.FORMAT, force)
    ) as staged:
        with ExitStack() as stack:
            writer, skipped = (
                _Writer(stack, staged, sizes),
                Skipped(stack, staged / dataset_info.MALFORMED, progress),
            )
            read = partial(
                _transformed,
                sizes=np.array(sizes),
                strict=strict,
                block_bytes=block_bytes,
                threads=stack.enter_context(workers),
            )
            sources = copy_rows(
                inputs,
                input_bytes,
                read,
                writer,
                skipped,
                progress,
                max_malformed,
            )
            skipped.finish()
            if not writer.rows:
                malformed = sum(source["malformed"] for source in sources)
                raise DataError(f"{', '.join(inputs)}: no well-formed row ({malformed} malformed)")
            manifest = writer.finish() | {"sources": sources}
        write_synced(staged / dataset_info.NAME, json.dumps(manifest, indent=1).encode() + b"\n")
    return manifest


@dataclass(frozen=True)
class _Transformed:
    """R rows as they are written: `labels` uint8 [R], `dense` float32 [R, 13], `ids` int32 [R, 26].

    `missing` int64 [39] counts the missing values of every column.
    """

    labels: np.ndarray
    dense: np.ndarray
    ids: np.ndarray
    missing: np.ndarray
    malformed: int
    examples: Iterator[Malformed]
    bytes_read: int
    unit: str


def _transformed(
    path: str, sizes: np.ndarray, strict: bool, block_bytes: int, threads: Threads
) -> Iterator[_Transformed]:
    """Yield the rows of a file block by block; blocks are parsed and transformed on threads."""

    def work(piece: Piece) -> _Transformed:
        rows = piece.rows()
        return _Transformed(
            rows.labels,
            transform_integers(rows.integers),
            row_ids(rows.categories, rows.missing[:, INTEGERS:], sizes),
            np.count_nonzero(rows.missing, axis=0),
            rows.malformed,
            rows.examples,
            rows.bytes_read,
            rows.unit,
        )

    for block in threads.in_order(pieces(path, block_bytes), work):
        if strict and block.malformed:
            raise DataError(str(next(block.examples)))
        yield block


def check_hash_sizes(hash_sizes: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the numbers of rows of the 26 tables.

    Raises `UsageError` for sizes out of range and for a list of more or fewer than 26 sizes.
    """
    if hash_sizes is None:
        return DEFAULT_HASH_SIZES
    sizes = (hash_sizes,) * CATEGORIES if isinstance(hash_sizes, int) else tuple(hash_sizes)
    if len(sizes) != CATEGORIES:
        raise UsageError(
            f"{len(sizes)} hash sizes given, one is needed for each of the {CATEGORIES} tables"
        )
    for size in sizes:
        if not 2 <= size < 2**31:
            raise UsageError(f"hash size {size} is not in 2 to {2**31 - 1}")
    return sizes


def order_warning(inputs: Sequence[str]) -> str | None:
    """Return a warning if files named `day_N` are not in the order of the numbers, else `None`.

    A shell sorts `day_*` by text.
    """
    days = [
        (int(match[1]), path) for path in inputs if (match := _DAY.match(os.path.basename(path)))
    ]
    for (day, path), (next_day, next_path) in zip(days, days[1:], strict=False):
        if next_day < day:
            return (
                f"{path} comes before {next_path}: rows are kept in the order of the files, "
                "and the last ones are held out for evaluation; "
                "the order of time is day_{0..23}, not day_*"
            )
    return None


def transform_integers(integers: np.ndarray) -> np.ndarray:
    """Return `ln(max(x, -2) + 3)` of `integers`, int64 [R, 13], as float32 [R, 13].

    A missing integer must come in as 0.
    """
    # In float64: the rounding to float32 hides the differences of numpy's logarithms by machine.
    logarithms: np.ndarray = np.log(np.maximum(integers, -2) + 3.0).astype("<f4")
    return logarithms


class _Writer:
    """The binary files of a dataset being written, with counts and checksums for the manifest."""

    def __init__(self, stack: ExitStack, directory: Path, sizes: tuple[int, ...]) -> None:
        self.rows = 0
        self._sizes = sizes
        self._clicks = 0
        self._missing = np.zeros(INTEGERS + CATEGORIES, np.int64)
        self._files = {
            name: stack.enter_context(open(directory / name, "wb")) for name in dataset_info.FILES
        }
        self._digests = {name: hashlib.sha256() for name in dataset_info.FILES}

    def write(self, rows: _Transformed) -> None:
        """Append the rows of a block."""
        self.rows += len(rows.labels)
        self._clicks += int(rows.labels.sum(dtype=np.int64))
        self._missing += rows.missing
        self._append("labels.bin", rows.labels)
        self._append("dense.bin", rows.dense)
        self._append("sparse.bin", rows.ids)

    def _append(self, name: str, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array, dataset_info.FILES[name][0]).data
        if data.nbytes:
            self._files[name].write(data)
            self._digests[name].update(data)

    def finish(self) -> dict[str, Any]:
        """Bring the files to disk and return the manifest without the sources."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return {
            "format": dataset_info.FORMAT,
            "format_version": dataset_info.VERSION,
            "rows": self.rows,
            "clicks": self._clicks,
            "tables": dict(zip(dataset_info.TABLE_NAMES, self._sizes, strict=True)),
            "transform": _TRANSFORM,
            "missing": dict(zip(COLUMN_NAMES[1:], self._missing.tolist(), strict=True)),
            "files": {
                name: {
                    "dtype": dtype,
                    "shape": [self.rows, *shape],
                    "bytes": self.rows * dataset_info.row_bytes(name),
                    "sha256": self._digests[name].hexdigest(),
                }
                for name, (dtype, shape) in dataset_info.FILES.items()
            },
        }

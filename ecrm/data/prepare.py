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
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ecrm.base.atomic_files import staged_directory
from ecrm.base.console import Progress
from ecrm.base.wording import counted
from ecrm.data import dataset_info
from ecrm.data.criteo import BLOCK_BYTES, Malformed, Rows, check_input, read_criteo
from ecrm.data.hashing import row_ids
from ecrm.data.kaggle_shape import CARDINALITIES, TERABYTE_CARDINALITIES
from ecrm.data.layout import CATEGORIES, COLUMN_NAMES, INTEGERS
from ecrm.errors import DataError, UsageError

SHOWN_MALFORMED = 20
NAMED_MALFORMED = 3  # in the error refusing a file
MALFORMED_BYTES = 16 << 20  # of malformed.txt; the last line counts the malformed lines left out
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
) -> dict[str, Any]:
    """Write the rows of Criteo text files as a dataset directory, and return its manifest.

    The files are read in order. `hash_sizes` is the number of rows of all tables, or a number for
    each of the 26 tables (`None`: `DEFAULT_HASH_SIZES`), from 2 to 2^31 - 1. Malformed lines are
    skipped, counted and named in `malformed.txt`, the first 20 shown. A file is refused if more
    than the share `max_malformed` of the lines, or of the first 100,000 or more, is malformed; with
    `strict` at the first malformed line. The directory appears once complete and on disk; before,
    and after a failure, `output_dir` is unchanged. With `force` an existing dataset is replaced. An
    empty directory is always replaced, any further file or directory never. Raises `UsageError` for
    bad arguments, unreadable inputs and an output not to be replaced, `DataError` for damaged,
    empty or refused inputs, `EcrmError` for a failed write.
    """
    if not 0 <= max_malformed <= 1:
        raise UsageError(f"--max-malformed {max_malformed:g}: type a share, from 0 to 1")
    sizes = check_hash_sizes(hash_sizes)
    if not inputs:
        raise UsageError("prepare needs at least one input file")
    input_bytes = [check_input(path) for path in inputs]
    target = Path(os.path.realpath(output_dir))
    if progress and (warning := order_warning(inputs)):
        progress.note(f"ecrm: warning: {warning}")
    with staged_directory(target, lambda: _check_replaceable(target, force)) as staged:
        with ExitStack() as stack:
            writer, skipped = (
                _Writer(stack, staged, sizes),
                _Skipped(stack, staged / dataset_info.MALFORMED, progress),
            )
            sources = _copy(
                inputs, input_bytes, writer, skipped, strict, progress, block_bytes, max_malformed
            )
            skipped.finish()
            if not writer.rows:
                malformed = sum(source["malformed"] for source in sources)
                raise DataError(f"{', '.join(inputs)}: no well-formed row ({malformed} malformed)")
            manifest = writer.finish() | {"sources": sources}
        _write_synced(staged / dataset_info.NAME, json.dumps(manifest, indent=1).encode() + b"\n")
    return manifest


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


def _check_replaceable(target: Path, force: bool) -> None:
    """Raise `UsageError` if `target` must not be replaced.

    `target` may be absent, an empty directory or, with `force`, a dataset without further files.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise UsageError(f"{target}: exists and is not a directory")
    entries = {entry.name for entry in target.iterdir()}
    if not entries:
        return
    foreign = sorted(entries - {dataset_info.NAME, dataset_info.MALFORMED, *dataset_info.FILES})
    if foreign or not dataset_info.holds_dataset(target):
        raise UsageError(
            f"{target}: is not empty and not a dataset made by prepare "
            f"(it holds {min(foreign or entries)}); it is left alone"
        )
    if not force:
        raise UsageError(f"{target}: already holds a prepared dataset; --force replaces it")


def _copy(
    inputs: Sequence[str],
    input_bytes: list[int | None],
    writer: _Writer,
    skipped: _Skipped,
    strict: bool,
    progress: Progress | None,
    block_bytes: int,
    max_malformed: float,
) -> list[dict[str, Any]]:
    """Write all rows of all inputs and return the manifest's records of the inputs."""
    known = [size for size in input_bytes if size is not None]
    total = sum(known) if len(known) == len(input_bytes) else None
    sources, done = [], 0
    for path in inputs:
        first_row, malformed, read, lines = writer.rows, 0, 0, 0
        first: list[Malformed] = []
        for rows in read_criteo(path, strict=strict, block_bytes=block_bytes):
            writer.write(rows)
            malformed += rows.malformed
            lines = writer.rows - first_row + malformed
            read = rows.bytes_read
            more = list(islice(rows.examples, NAMED_MALFORMED - len(first)))
            first += more
            skipped.add(rows.malformed, chain(more, rows.examples))
            if lines >= dataset_info.JUDGED_LINES:
                _judge(path, malformed, lines, first, max_malformed, of="the first ")
            if progress:
                fraction = (done + read) / total if total else None
                progress.update(writer.rows, f"{(done + read) / 1e6:,.1f} MB", fraction)
        done += read
        _judge(path, malformed, lines, first, max_malformed)
        if progress and malformed:
            progress.note(
                f"{path}: {counted(malformed, 'malformed line')} skipped, "
                f"{writer.rows - first_row:,} rows read"
            )
        sources.append(
            {"name": path, "bytes": read, "rows": writer.rows - first_row, "malformed": malformed}
        )
    return sources


def _judge(
    path: str, malformed: int, lines: int, first: Sequence[Malformed], allowed: float, of: str = ""
) -> None:
    """Raise DataError if more than the share `allowed` of a file's lines read is malformed.

    `malformed` of the `lines` read are malformed; `first` are the first few malformed lines. `of`
    is a phrase for the message while the file has more lines to read.
    """
    if malformed > allowed * lines:
        named = "; ".join(f"line {one.line}: {one.reason}" for one in first)
        raise DataError(
            f"{path}: {malformed:,} of {of}{lines:,} lines ({malformed / lines:.2%}) are "
            f"malformed, --max-malformed is {allowed:g}, so nothing was written; "
            f"{named}{'; and so on' if malformed > len(first) else ''}; "
            "correct the file, or type --max-malformed 1 to skip all such lines"
        )


class _Skipped:
    """Names malformed lines: up to `MALFORMED_BYTES` in a file, the first few to the user.

    The first malformed line creates the file.
    """

    def __init__(self, stack: ExitStack, path: Path, progress: Progress | None) -> None:
        self._stack, self._path, self._progress = stack, path, progress
        self._file: BinaryIO | None = None
        self._count = self._written = self._size = 0

    def add(self, count: int, examples: Iterator[Malformed]) -> None:
        """Name the `count` malformed lines of a block, described in turn by `examples`."""
        self._count += count
        while self._size < MALFORMED_BYTES and (example := next(examples, None)) is not None:
            if self._progress and self._written < SHOWN_MALFORMED:
                self._progress.note(f"skipped {example}")
            self._write(f"{example}\n")
            self._written += 1

    def finish(self) -> None:
        """Write the number of lines left out, and bring the file to disk."""
        if self._file is None:
            return
        if self._count > self._written:
            self._write(f"and {self._count - self._written:,} more\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _write(self, line: str) -> None:
        if self._file is None:
            self._file = self._stack.enter_context(open(self._path, "wb"))
        data = line.encode("utf-8", "backslashreplace")
        self._file.write(data)
        self._size += len(data)


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

    def write(self, rows: Rows) -> None:
        """Append the rows of a block."""
        self.rows += len(rows.labels)
        self._clicks += int(rows.labels.sum(dtype=np.int64))
        self._missing += np.count_nonzero(rows.missing, axis=0)
        self._append("labels.bin", rows.labels)
        self._append("dense.bin", transform_integers(rows.integers))
        self._append(
            "sparse.bin",
            row_ids(rows.categories, rows.missing[:, INTEGERS:], np.array(self._sizes)),
        )

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


def _write_synced(path: Path, data: bytes) -> None:
    """Write a small file and bring it to disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

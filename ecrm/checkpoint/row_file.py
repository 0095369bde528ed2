"""A file of row records, in frames, so that no rank has to hold a whole file.

A frame is b"ECRMROWS", the number R of rows and the size B of a record (both u32), R row numbers
(i64) and R records of B bytes; everything little endian. Row numbers count in the row space: the
file does not tell the places of rows on ranks.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ecrm.base.errors import DataError
from ecrm.checkpoint.disk import BLOCK, Disk

HEADER = struct.Struct("<8sII")
MAGIC = b"ECRMROWS"
FRAME_ROWS = 1 << 16
"""Most rows in a frame: bounds the memory of writing, reading and sending."""


READ_BYTES = 1 << 22
"""Most bytes of records read at once: small enough that the next piece reuses their memory."""

PIECE = 1 << 20
"""Bytes written at once: summed and written while still in the processor's cache."""


class SummedFile:
    """A file being written, synced at the end of a `with` block without an error.

    `bytes` and `checksum`, a CRC-32, cover all bytes written to disk; all of the file after the
    sync.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk, self._file, self.name = disk, disk.create(path), path.name
        self._piece = np.frombuffer(mmap.mmap(-1, PIECE), np.uint8)  # begins at a page
        self._held = self.bytes = self.checksum = 0

    def write(self, data: bytes | memoryview | np.ndarray) -> None:
        """Append `data`, contiguous."""
        rest = np.frombuffer(data, np.uint8)
        while len(rest):
            some, rest = np.split(rest, [PIECE - self._held])
            self._piece[self._held : self._held + len(some)] = some
            self._held += len(some)
            if self._held == PIECE:
                self._flush(PIECE)

    def _flush(self, upto: int) -> None:
        """Write the first `upto` held bytes."""
        data = self._piece[:upto].data
        self.checksum = zlib.crc32(data, self.checksum)
        self._disk.write(self._file, data)
        self.bytes += upto
        self._held -= upto
        self._piece[: self._held] = self._piece[upto : upto + self._held]

    def __enter__(self) -> SummedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                for size in (self._held // BLOCK * BLOCK, self._held % BLOCK):
                    if size:
                        self._flush(size)
        finally:
            self._disk.close(self._file)


def write_rows(
    disk: Disk, path: Path, space: int, windows: Iterable[tuple[np.ndarray, np.ndarray]]
) -> dict[str, object]:
    """Write windows of (row numbers int64 [R], records uint8 [R, B]), R up to FRAME_ROWS.

    Windows without rows are skipped. Returns the manifest's entry of the file.
    """
    rows = frames = 0
    with SummedFile(disk, path) as file:
        for numbers, records in windows:
            if not len(numbers):
                continue
            file.write(HEADER.pack(MAGIC, len(numbers), records.shape[1]))
            file.write(np.ascontiguousarray(numbers, "<i8"))
            file.write(np.ascontiguousarray(records))
            rows, frames = rows + len(numbers), frames + 1
    return {
        "name": path.name,
        "space": space,
        "rows": rows,
        "frames": frames,
        "bytes": file.bytes,
        "crc32": file.checksum,
    }


def read_rows(path: Path, record_bytes: int, rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the rows of a file in pieces: (numbers int64 [R], records uint8 [R, B]).

    A piece lies in one frame, and has READ_BYTES of records at most, or one record. Raises
    DataError if a frame is not whole, or names a row outside 0 to `rows` - 1: earlier pieces of
    the frame may have been yielded.
    """
    with open(path, "rb") as file:
        while header := file.read(HEADER.size):
            if len(header) < HEADER.size:
                raise DataError(f"{path}: cut off in the header of a frame")
            magic, count, size = HEADER.unpack(header)
            if magic != MAGIC or size != record_bytes or not 0 < count <= FRAME_ROWS:
                raise DataError(f"{path}: a frame does not begin as it should")
            numbers = np.empty(count, "<i8")
            if file.readinto(numbers.view(np.uint8).data) < numbers.nbytes:
                raise DataError(f"{path}: cut off in a frame of {count} rows")
            if (numbers < 0).any() or (numbers >= rows).any():
                raise DataError(f"{path}: names a row that is not one of {rows}")
            for here in np.split(numbers, range(_at_once(size), count, _at_once(size))):
                records = np.empty((len(here), size), np.uint8)
                if file.readinto(records.reshape(-1).data) < records.nbytes:
                    raise DataError(f"{path}: cut off in a frame of {count} rows")
                yield here, records


def most_pieces(entry: Mapping[str, Any], record_bytes: int) -> int:
    """The most pieces that `read_rows` yields of a file, from the file's entry in the manifest."""
    return int(entry["frames"]) + int(entry["rows"]) // _at_once(record_bytes)


def _at_once(record_bytes: int) -> int:
    """The most rows in a piece."""
    return max(1, READ_BYTES // record_bytes)

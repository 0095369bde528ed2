"""Read and write bytes at a place of a file, all or an error, and the words of a shard's file.

Light: no numpy.
"""

from __future__ import annotations

import os
import struct
from io import FileIO
from pathlib import Path

from ecrm.base.errors import DataError

SHARD_WORDS = ("committed", "prepared", "base0", "length0", "base1", "length1", "bytes")
"""Names of the words of a shard's file, in their order."""


def open_file(path: Path) -> FileIO:
    """Open a file for reading and writing; make a missing file. Raises OSError."""
    return FileIO(
        path, "r+", opener=lambda name, flags: os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
    )


def write_at(file: FileIO, data: bytes, at: int, durable: bool) -> None:
    """Write all of `data`; with `durable`, to the device before the return. Raises OSError."""
    left = memoryview(data)
    while left:
        written = os.pwrite(file.fileno(), left, at)
        left, at = left[written:], at + written
    if durable:
        os.fdatasync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the device. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_at(file: FileIO, size: int, at: int) -> bytes:
    """Read all `size` bytes. Raises OSError, and DataError if the file ends before."""
    pieces, end = [], at + size
    while at < end:
        piece = os.pread(file.fileno(), end - at, at)
        if not piece:
            raise DataError(f"{file.name}: ends at byte {at}, {end} are needed")
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


def read_words(path: Path) -> dict[str, int]:
    """The words of a shard's file by name. Raises OSError, and ValueError for too short a file."""
    data = path.read_bytes()
    if len(data) < 8 * len(SHARD_WORDS):
        raise ValueError(f"{path}: {len(data)} bytes are too few")
    return dict(zip(SHARD_WORDS, struct.unpack_from(f"<{len(SHARD_WORDS)}q", data), strict=True))

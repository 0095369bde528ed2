"""All calls that bring a checkpoint to disk, in one class, so that tests can interrupt them."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import BinaryIO

BLOCK = 4096
"""Bytes of a block. Only whole blocks, in memory aligned to blocks, can go past the page cache."""


class Disk:
    """Plain files, unbuffered in this process; synced data survives a power cut.

    Whole blocks go past the page cache if the file system allows: nobody reads the data soon, and
    pages would cost more processor time than all the rest.
    """

    def make_folder(self, path: Path, parents: bool = True) -> None:
        path.mkdir(parents=parents, exist_ok=True)

    def create(self, path: Path) -> BinaryIO:
        """A new file, replacing any file of the same name."""
        try:
            return open(path, "wb", buffering=0, opener=_past_the_page_cache)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        return open(path, "wb", buffering=0)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Write all of `data`; raises OSError on failure.

        After a write of anything but whole blocks, later writes use the page cache.
        """
        rest = memoryview(data).cast("B")
        if len(rest) % BLOCK:
            _through_the_page_cache(file)
        while rest:
            try:
                written = file.write(rest)
            except OSError as error:
                if error.errno != errno.EINVAL or not _through_the_page_cache(file):
                    raise
                continue  # memory not aligned, or a file system of larger blocks
            rest = rest[written:]

    def close(self, file: BinaryIO) -> None:
        """Sync and close."""
        try:
            os.fsync(file.fileno())
        finally:
            file.close()

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder survive a power cut."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, file: Path) -> None:
        file.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        shutil.rmtree(path)


def _past_the_page_cache(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_DIRECT, 0o666)


def _through_the_page_cache(file: BinaryIO) -> bool:
    """Switch a file to the page cache; returns whether the file went past the cache before."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)

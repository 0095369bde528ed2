"""The calls by which a checkpoint reaches the disk, in one place so that tests can cut them anywhere."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO


class Disk:
    """Plain files; nothing is buffered in this process, and what was synced outlives a power cut."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> BinaryIO:
        """A new file, replacing any of that name."""
        return open(path, "wb", buffering=0)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """All of `data`, or OSError."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[file.write(rest) :]

    def close(self, file: BinaryIO) -> None:
        """Sync and close."""
        try:
            os.fsync(file.fileno())
        finally:
            file.close()

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder outlive a power cut."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, file: Path) -> None:
        file.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        shutil.rmtree(path)

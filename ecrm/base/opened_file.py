"""A file that a run reads for as long as it lasts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from ecrm.errors import DataError


class OpenedFile:
    """An open file, which must stay as it was when it was opened.

    A file that another has replaced under its name is still here as it was. `known` are its device,
    inode, size and time of change. Python closes the file with this object.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = os.fdopen(os.dup(file.fileno()), "rb", buffering=0)
        self.known = self._now()

    def check(self) -> None:
        """Raise DataError where the file has been written to, or cut, since it was opened."""
        if self._now() != self.known:
            raise DataError(
                f"{self._path} has changed since this run opened it, and the run reads it to its "
                "end: begin again with a file that stays as it is, such as a copy"
            )

    def _now(self) -> tuple[int, ...]:
        found = os.fstat(self._file.fileno())
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

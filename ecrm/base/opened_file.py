"""A file read by a run until its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from ecrm.base.errors import DataError


class OpenedFile:
    """An open file, which must not change after opening.

    A file replaced under its name is still read in its old state. `known` has device, inode, size
    and time of change. Python closes the file together with this object.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = os.fdopen(os.dup(file.fileno()), "rb", buffering=0)
        self.known = self._now()

    def check(self) -> None:
        """Raise DataError if the file has been written to, or cut, since its opening."""
        if self._now() != self.known:
            raise DataError(
                f"{self._path} has changed since this run opened it, and the run reads it to its "
                "end: begin again with a file that stays as it is, such as a copy"
            )

    def _now(self) -> tuple[int, ...]:
        found = os.fstat(self._file.fileno())
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

"""A few integers in a file. A change is a single store, so no kill can tear an integer."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ecrm.protection.mapped_files.file_access import sync

WORD = np.dtype("<i8")
PAGE = mmap.PAGESIZE


class Words:
    """Named int64 words, mapped from one page of a file.

    A change is in the file at once, and on the device once `flush` returns. A new file gets
    `initial` and its name in one step; for an existing file `initial` only gives the names of
    words. With `durable` a new file is then on the device, and names made earlier in the folder are
    on the device before. Raises OSError.
    """

    def __init__(self, path: Path, initial: dict[str, int], durable: bool) -> None:
        self._names = {name: place for place, name in enumerate(initial)}
        if not path.exists():
            new = path.with_name(f".{path.name}.new")
            new.write_bytes(_page(list(initial.values())))
            if durable:
                sync(new)
                sync(path.parent)
            os.replace(new, path)
        if durable:
            sync(path.parent)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), PAGE)
        self._words = np.frombuffer(self._map, WORD)

    def __getitem__(self, name: str) -> int:
        return int(self._words[self._names[name]])

    def __setitem__(self, name: str, value: int) -> None:
        self._words[self._names[name]] = value

    def flush(self) -> None:
        """Wait until all changes are on the device."""
        self._map.flush()


def _page(values: Sequence[int]) -> bytes:
    return np.array(values, WORD).tobytes().ljust(PAGE, b"\0")

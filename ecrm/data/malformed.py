"""Malformed rows of an input: counted, named, and limited in number."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ecrm.base.console import Progress
from ecrm.base.errors import DataError, UsageError

SHOWN_MALFORMED = 20
NAMED_MALFORMED = 3  # in the error refusing a file
MALFORMED_BYTES = 16 << 20  # of malformed.txt; the last line counts the malformed lines left out


@dataclass(frozen=True)
class Malformed:
    """A malformed line: the file, the line number counted from 1, and the reason.

    `advice` says the words to type, if all lines are malformed for the reason.
    """

    path: str
    line: int
    reason: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def check_share(max_malformed: float) -> None:
    """Raise UsageError unless `max_malformed` is a share, from 0 to 1."""
    if not 0 <= max_malformed <= 1:
        raise UsageError(f"--max-malformed {max_malformed:g}: type a share, from 0 to 1")


def judge(
    path: str,
    malformed: int,
    lines: int,
    first: Sequence[Malformed],
    allowed: float,
    unit: str = "line",
    of: str = "",
) -> None:
    """Raise DataError if more than the share `allowed` of a file's lines read is malformed.

    `malformed` of the `lines` read are malformed; `first` are the first few malformed lines. `unit`
    is the noun of a line. `of` is a phrase for the message while the file has more lines to read.
    """
    if malformed > allowed * lines:
        named = "; ".join(f"{unit} {one.line}: {one.reason}" for one in first)
        way = f"correct the file, or type --max-malformed 1 to skip all such {unit}s"
        if malformed == lines:  # to skip all lines would leave none
            way = next((one.advice for one in first if one.advice), "correct the file")
        raise DataError(
            f"{path}: {malformed:,} of {of}{lines:,} {unit}s ({malformed / lines:.2%}) are "
            f"malformed, --max-malformed is {allowed:g}, so nothing was written; "
            f"{named}{'; and so on' if malformed > len(first) else ''}; "
            f"{way}"
        )


class Skipped:
    """Names malformed lines: up to `MALFORMED_BYTES` in a file, the first few to the user.

    The first malformed line creates the file. `first` is that line.
    """

    first: Malformed | None = None

    def __init__(self, stack: ExitStack, path: Path, progress: Progress | None) -> None:
        self._stack, self._path, self._progress = stack, path, progress
        self._file: BinaryIO | None = None
        self._count = self._written = self._size = 0

    def add(self, count: int, examples: Iterator[Malformed]) -> None:
        """Name the `count` malformed lines of a block, described in turn by `examples`."""
        self._count += count
        while self._size < MALFORMED_BYTES and (example := next(examples, None)) is not None:
            self.first = self.first or example
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

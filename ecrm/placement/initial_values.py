"""What rows of a table are before their first update."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ecrm.base.opened_file import OpenedFile
from ecrm.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

WINDOW_BYTES = 16 << 20
"""Values in a file are read to their digest in pieces of so many bytes."""


@dataclass(frozen=True)
class Uniform:
    """Numbers from `low` to `high`, by the same hash of (seed, table, row, column) as the default.

    Raises UsageError where there are none.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise UsageError(
                f"rows cannot begin uniform from {self.low} to {self.high}: "
                "both must be finite, the first not above the second"
            )


@dataclass(frozen=True)
class InitFunction:
    """What `function` writes into a row, float32 [1, dim], zeros before, as TorchRec's `init_fn`.

    It is called for each row by itself, with torch's generator seeded for that row, so that it does
    not matter who holds the row. So a function that looks at the shape, such as `xavier_uniform_`,
    sees one row, not the table. It must draw from torch's own generator alone, which others must
    not use meanwhile; afterwards that is as it was. What it returns is not looked at.

    A call takes some 13 microseconds where the hash takes 0.2. It is made whenever a row is asked
    for that no step has updated yet.
    """

    function: Callable[[Tensor], object]


@dataclass(frozen=True, eq=False)
class Values:
    """The values themselves, float32 [rows, dim]: the same on every rank, which keeps them."""

    values: Tensor

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the values."""
        return _digest(self.values)

    def read(self, rows: Tensor) -> Tensor:
        """The values of rows, float32 [R, dim]."""
        return self.values[rows]


@dataclass(frozen=True, eq=False)
class FileValues:
    """Values that lie in a file, mapped, float32 [rows, dim]: read when they are asked for.

    `source` is the file, which every rank sees.
    `digest` is that of `digest_of_windows`, "" as long as nobody has read all of them. `opened` is
    the file, None where nobody looks whether it has changed. `others` are the values as the file
    has them under other names of the table.
    """

    values: Tensor
    source: str
    digest: str = ""
    opened: OpenedFile | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def windows(self) -> range:
        """The first rows of the windows in which values are read to their digest."""
        return range(0, len(self.values), self._window_rows)

    @property
    def _window_rows(self) -> int:
        return max(1, WINDOW_BYTES // max(1, self.values[:1].nbytes))

    def window_digest(self, first: int) -> str:
        """SHA-256 of the window that begins with row `first`. Raises DataError as `read` does."""
        return _digest(self.read(slice(first, first + self._window_rows)))

    def read(self, rows: Tensor | slice) -> Tensor:
        """The values of rows, float32 [R, dim].

        Raises DataError where the file has changed since it was opened. A file that is cut short
        while it is read ends the process.
        """
        self._check()
        found = self.values[rows]
        self._check()
        return found

    def _check(self) -> None:
        if self.opened is not None:
            self.opened.check()


def digest_of_windows(digests: Iterable[str]) -> str:
    """The digest of values by those of their windows, in order."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().data).hexdigest()


Initial = Uniform | InitFunction | Values | FileValues

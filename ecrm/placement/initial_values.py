"""The values of a table's rows before the first update."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ecrm.base.errors import UsageError
from ecrm.base.opened_file import OpenedFile

if TYPE_CHECKING:
    from torch import Tensor

WINDOW_BYTES = 16 << 20
"""Bytes of values read from a file at a time for the digest."""


@dataclass(frozen=True)
class Uniform:
    """Numbers from `low` to `high`, by the same hash of (seed, table, row, column) as the default.

    Raises UsageError for bounds not finite or in the wrong order.
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
    """Values that `function` writes into a row of zeros, float32 [1, dim], as TorchRec's `init_fn`.

    `function` is called for every row alone, with torch's generator seeded for the row, so the
    holder of the row makes no difference. A function using the shape, such as `xavier_uniform_`,
    sees one row, not the table. `function` must draw from torch's own generator alone. Nothing else
    may use the generator meanwhile; its state is restored afterwards. The return value is ignored.

    A call takes some 13 microseconds, the hash takes 0.2. Every request for a row without any
    update so far makes a call.
    """

    function: Callable[[Tensor], object]


@dataclass(frozen=True, eq=False)
class Values:
    """Given values, float32 [rows, dim]: every rank keeps the same values."""

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
    """Values in a mapped file, float32 [rows, dim], read on request.

    `source` is the file, seen by every rank. `digest` is from `digest_of_windows`, "" before all
    values were read. `opened` is the file, `None` if changes of the file are not looked for.
    `others` are the values stored in the file under other names of the table.
    """

    values: Tensor
    source: str
    digest: str = ""
    opened: OpenedFile | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def windows(self) -> range:
        """The first rows of all windows, the pieces of values read for the digest."""
        return range(0, len(self.values), self._window_rows)

    @property
    def _window_rows(self) -> int:
        return max(1, WINDOW_BYTES // max(1, self.values[:1].nbytes))

    def window_digest(self, first: int) -> str:
        """SHA-256 of the window beginning with row `first`. Raises DataError as `read` does."""
        return _digest(self.read(slice(first, first + self._window_rows)))

    def read(self, rows: Tensor | slice) -> Tensor:
        """The values of rows, float32 [R, dim].

        Raises DataError if the file has changed since the opening. Cutting the file short during a
        read ends the process.
        """
        self._check()
        found = self.values[rows]
        self._check()
        return found

    def _check(self) -> None:
        if self.opened is not None:
            self.opened.check()


def digest_of_windows(digests: Iterable[str]) -> str:
    """The digest of values from the digests of all windows, in order."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().data).hexdigest()


Initial = Uniform | InitFunction | Values | FileValues

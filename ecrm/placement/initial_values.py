"""What rows of a table are before their first update."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ecrm.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


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
        return hashlib.sha256(self.values.contiguous().numpy().data).hexdigest()


Initial = Uniform | InitFunction | Values

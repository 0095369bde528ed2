"""Initial values of rows: a pure hash of (seed, table, row, column), whoever holds the row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ecrm.kernels.hash_uniform import hash_uniform
from ecrm.placement.tables import RowSpace


class InitialRows:
    """Initial values of the rows of a row space.

    Uniform in [-1/sqrt(n), 1/sqrt(n)) for a table of n rows, as TorchRec's tables begin.
    """

    def __init__(self, space: RowSpace, seed: int) -> None:
        self._seed, self._dim, self._padding = seed, space.dim, len(space.tables)
        # One entry more, for padding: rows past the end of the space.
        self._offsets = torch.tensor([*space.offsets, space.rows])
        self._numbers = torch.tensor([*space.table_numbers, 0])
        self._bounds = torch.tensor(
            [*(1.0 / math.sqrt(table.rows) for table in space.tables), 0.0], dtype=torch.float32
        )

    def __call__(self, rows: Tensor) -> Tensor:
        """Float32 [R, dim]; R row numbers of the space, int64, any order. Padding is zero."""
        place = torch.bucketize(rows, self._offsets[1:], right=True)
        values = hash_uniform(
            self._seed,
            self._numbers[place],
            rows - self._offsets[place],
            self._dim,
            self._bounds[place],
        )
        padding = place == self._padding
        if padding.any():
            values[padding] = 0.0  # to the bit: the hash times a bound of 0 has either sign
        return values

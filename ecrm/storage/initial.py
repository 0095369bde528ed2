"""Initial values of rows: a pure hash of (seed, table, row, column), whoever holds the row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ecrm.kernels.hash_uniform import hash_uniform
from ecrm.placement.tables import RowSpace


def initial_rows(space: RowSpace, rows: Tensor, seed: int) -> Tensor:
    """Initial values of rows of a row space, float32 [R, dim]; R row numbers, int64, any order.

    Uniform in [-1/sqrt(n), 1/sqrt(n)) for a table of n rows, as torchrec initialises its tables; rows
    past the end of the space are padding and zero.
    """
    values = torch.zeros(rows.numel(), space.dim)
    for table, number, offset in zip(space.tables, space.table_numbers, space.offsets, strict=True):
        inside = ((rows >= offset) & (rows < offset + table.rows)).nonzero().squeeze(1)
        if inside.numel():
            bound = 1.0 / math.sqrt(table.rows)
            values[inside] = hash_uniform(seed, number, rows[inside] - offset, space.dim, bound)
    return values

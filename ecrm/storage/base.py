"""Storage of one shard's rows of one row space, with their optimizer state.

A record is a row's bytes followed by its optimizer state's bytes: what parity protects, what undo
restores and what travels when a row is rebuilt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ecrm.kernels.records import gather_records, scatter_records, xor_records


@dataclass(frozen=True)
class SparseOptimizer:
    """Sparse optimizer by name (`sgd`, `rowwise_adagrad`, `adagrad`), its learning rate and epsilon."""

    name: str
    learning_rate: float
    epsilon: float = 1e-8


class Store(ABC):
    """Rows and optimizer state, updated in place.

    `weights` is float32 [rows, dim]; `state` holds float32 tensors [rows] (row-wise) or [rows, dim].
    Both are the storage itself, not copies. `rows` arguments are int64 local row numbers; ranges are
    not checked. R = number of row arguments, B = `record_bytes`.
    """

    weights: Tensor
    state: tuple[Tensor, ...]

    @property
    def record_bytes(self) -> int:
        return sum(t[:1].numel() * t.element_size() for t in (self.weights, *self.state))

    @property
    def memory_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.weights, *self.state))

    def lookup(self, rows: Tensor) -> Tensor:
        """Copy of the rows, float32 [R, dim]."""
        return self.weights.index_select(0, rows)

    def read(self, rows: Tensor) -> Tensor:
        """Records, uint8 [R, B]."""
        return gather_records(self.weights, self.state, rows)

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Overwrite rows and state with records, uint8 [R, B]."""
        scatter_records(self.weights, self.state, rows, records)

    def xor(self, rows: Tensor, delta: Tensor) -> None:
        """XOR rows and state with deltas, uint8 [R, B]: applying an update's delta again takes it back."""
        xor_records(self.weights, self.state, rows, delta)

    @abstractmethod
    def update(self, rows: Tensor, gradients: Tensor) -> None:
        """Run the optimizer on unique rows with their summed gradients, float32 [R, dim], in place."""

    def update_with_delta(self, rows: Tensor, gradients: Tensor) -> Tensor:
        """`update`, and the XOR of each record before and after, uint8 [R, B]."""
        delta = self.read(rows)
        self.update(rows, gradients)
        return delta.bitwise_xor_(self.read(rows))


def state_shapes(optimizer: str, rows: int, dim: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the optimizer state tensors; raises ValueError for an unknown optimizer."""
    shapes = {"sgd": (), "rowwise_adagrad": ((rows,),), "adagrad": ((rows, dim),)}
    if optimizer not in shapes:
        raise ValueError(f"unknown sparse optimizer {optimizer!r}: one of {', '.join(shapes)}")
    return shapes[optimizer]


def lazy_zeros(*shape: int, dtype: type = np.float32) -> Tensor:
    """Zeros whose memory the system hands out page by page as it is used: a lost shard's heir starts at once.

    torch.zeros writes all of it, seconds for a shard of some gigabytes.
    """
    return torch.from_numpy(np.zeros(shape, dtype))


def zeros(rows: int, dim: int, optimizer: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Zeroed weights and state."""
    return lazy_zeros(rows, dim), tuple(lazy_zeros(*shape) for shape in state_shapes(optimizer, rows, dim))

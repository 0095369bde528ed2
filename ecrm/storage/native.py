"""Rows in plain tensors, updated by this project's fused `sparse_update` kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ecrm.kernels.sparse_update import sparse_update
from ecrm.storage.base import Allocate, SparseOptimizer, Store

_ONE = int(torch.ones(1).view(torch.int32))


class NativeStore(Store):
    """Update and delta in one pass over the rows."""

    def __init__(self, rows: int, dim: int, optimizer: SparseOptimizer, initial: Callable[[Tensor], Tensor], allocate: Allocate | None = None) -> None:
        super().__init__(rows, dim, optimizer, initial, allocate)
        self._optimizer = optimizer

    def update_with_delta(self, rows: Tensor, gradients: Tensor) -> Tensor:
        fresh, values = self._materialise(rows)
        delta = torch.empty(rows.numel(), self.record_bytes, dtype=torch.uint8)
        self._step(rows, gradients, delta[:, : -self._touched.element_size()])
        words = delta.view(torch.int32)
        words[:, -1] = 0
        if fresh.numel():  # their records were zeros, not the values that the kernel started from
            words[fresh, : values.shape[1]] ^= values.view(torch.int32)
            words[fresh, -1] = _ONE
        return delta

    def _step(self, rows: Tensor, gradients: Tensor, delta: Tensor | None = None) -> None:
        optimizer = self._optimizer
        sparse_update(
            self.weights,
            self.state,
            rows,
            gradients,
            optimizer.name,
            lr=optimizer.learning_rate,
            eps=optimizer.epsilon,
            delta=delta,
        )

"""Rows in plain tensors, updated by this project's fused `sparse_update` kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ecrm.kernels.sparse_update import sparse_update
from ecrm.storage.base import SparseOptimizer, Store, zeros


class NativeStore(Store):
    """Plain CPU tensors, all zero at first; update and delta in one pass over the rows."""

    def __init__(self, rows: int, dim: int, optimizer: SparseOptimizer) -> None:
        self._optimizer = optimizer
        self.weights, self.state = zeros(rows, dim, optimizer.name)

    def update(self, rows: Tensor, gradients: Tensor) -> None:
        self._run(rows, gradients, None)

    def update_with_delta(self, rows: Tensor, gradients: Tensor) -> Tensor:
        delta = torch.empty(rows.numel(), self.record_bytes, dtype=torch.uint8)
        self._run(rows, gradients, delta)
        return delta

    def _run(self, rows: Tensor, gradients: Tensor, delta: Tensor | None) -> None:
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

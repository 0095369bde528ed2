"""Rows in plain tensors, updated by this project's `sparse_update` kernel."""

from __future__ import annotations

from torch import Tensor

from ecrm.storage.base import Store


class NativeStore(Store):
    """Rows and state in memory of their own, no library beneath."""

    def _step(self, rows: Tensor, gradients: Tensor) -> None:
        self._fused_step(rows, gradients)

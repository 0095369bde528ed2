"""Rows in an FBGEMM table-batched embedding, updated by FBGEMM's fused optimizers (CPU)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from ecrm.storage.base import SparseOptimizer, Store

_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
}


class FbgemmStore(Store):
    """A one-table FBGEMM TBE over this store's memory."""

    def __init__(self, rows: int, dim: int, optimizer: SparseOptimizer, initial: Callable[[Tensor], Tensor]) -> None:
        super().__init__(rows, dim, optimizer, initial)
        buffers = {"weights": self.weights.view(-1)}
        buffers |= {f"momentum{number}": part.view(-1) for number, part in enumerate(self.state, 1)}
        self._tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=_OPTIMIZERS[optimizer.name],
            learning_rate=optimizer.learning_rate,
            eps=optimizer.epsilon,
            pooling_mode=PoolingMode.SUM,
            preallocated_host_buffers=buffers,
        )

    def _step(self, rows: Tensor, gradients: Tensor) -> None:
        if rows.numel() == 0:
            return
        offsets = torch.arange(rows.numel() + 1, dtype=torch.int64)
        with torch.enable_grad():
            self._tbe(rows, offsets).backward(gradients)

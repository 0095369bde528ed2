"""The oracle of row updates: rows in an FBGEMM table-batched embedding (CPU).

FBGEMM's fused optimizers update the rows, unless deltas of records are wanted. FBGEMM cannot give
deltas, so the project's `sparse_update` then updates the same memory, to the same bits
(tests/unit/test_kernels_fbgemm.py, tests/unit/test_storage.py).

`sparse_update` also does all updates that FBGEMM's CPU build lacks or does wrongly: Adam is
missing, and weight decay is ignored. A learning rate changing by step is the third case, since
FBGEMM's rate is set once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from ecrm.base.allocate import Allocate
from ecrm.placement.sparse_optimizer import SparseOptimizer, SparseRate
from ecrm.storage.base import Store

_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
}


_SLICE_FLOATS = 1 << 30
"""Most floats of a slice.

FBGEMM 1.8's CPU row-wise Adagrad writes a row beginning 4 GiB or more into the table 4 GiB before
the row's place.
"""


class FbgemmStore(Store):
    """One-table FBGEMM TBEs over slices of the store, small enough for FBGEMM's offsets."""

    def __init__(
        self,
        rows: int,
        dim: int,
        optimizer: SparseOptimizer,
        initial: Callable[[Tensor], Tensor],
        allocate: Allocate | None = None,
        rate: SparseRate | None = None,
    ) -> None:
        super().__init__(rows, dim, optimizer, initial, allocate, rate)
        self._slice_rows = max(_SLICE_FLOATS // dim, 1)

    @cached_property
    def _slices(self) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
        """The TBEs, made at the first update of rows by FBGEMM.

        If every update's delta is wanted, TBEs are never made, so a takeover does not wait.
        """
        slices = [
            slice(first, first + self._slice_rows)
            for first in range(0, max(len(self.weights), 1), self._slice_rows)
        ]
        return [
            _embedding(self.weights[s], [part[s] for part in self.state], self._optimizer)
            for s in slices
        ]

    @property
    def _fbgemm_can(self) -> bool:
        """Whether FBGEMM has the optimizer, and computes it right."""
        optimizer = self._optimizer
        return optimizer.name in _OPTIMIZERS and not optimizer.weight_decay and self._rate is None

    def _step(self, rows: Tensor, gradients: Tensor, step: int) -> None:
        if not self._fbgemm_can:
            self._fused_step(rows, gradients, step)
            return
        if len(self._slices) == 1:
            _update(self._slices[0], rows, gradients)
            return
        owners = rows // self._slice_rows
        for number, embedding in enumerate(self._slices):
            chosen = (owners == number).nonzero().squeeze(1)
            _update(embedding, rows[chosen] - number * self._slice_rows, gradients[chosen])


def _embedding(
    weights: Tensor, state: list[Tensor], optimizer: SparseOptimizer
) -> SplitTableBatchedEmbeddingBagsCodegen:
    buffers = {"weights": weights.view(-1)}
    buffers |= {f"momentum{number}": part.view(-1) for number, part in enumerate(state, 1)}
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(*weights.shape, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=_OPTIMIZERS[optimizer.name],
        learning_rate=optimizer.learning_rate,
        eps=optimizer.epsilon,
        pooling_mode=PoolingMode.SUM,
        preallocated_host_buffers=buffers,
    )


def _update(
    embedding: SplitTableBatchedEmbeddingBagsCodegen, rows: Tensor, gradients: Tensor
) -> None:
    if rows.numel() == 0:
        return
    offsets = torch.arange(rows.numel() + 1, dtype=torch.int64)
    with torch.enable_grad():
        embedding(rows, offsets).backward(gradients)

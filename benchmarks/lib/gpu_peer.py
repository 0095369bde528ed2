"""What one would do without this project's kernels on a GPU: FBGEMM's tables on CUDA."""

from __future__ import annotations

import importlib.metadata
import warnings

import torch

from lib.gpu_cases import GpuCase, Sizes


def fbgemm_case(sizes: Sizes, device: torch.device) -> GpuCase:
    """FBGEMM's backward pass with row-wise Adagrad, between two gathers and an XOR of rows.

    Its forward pass is not timed. Raises ImportError where FBGEMM's build is not that for CUDA.
    """
    try:
        importlib.metadata.version("fbgemm-gpu")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError("fbgemm-gpu, the build for CUDA, is not installed") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(sizes.height, sizes.dimension, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
        device=device,
    )
    weights = table.split_embedding_weights()[0]
    rows = torch.randperm(sizes.height, device=device)[: sizes.touched]
    offsets = torch.arange(sizes.touched + 1, device=device)
    gradients = torch.randn(sizes.touched, sizes.dimension, device=device)
    pooled: list[torch.Tensor] = []

    def forward() -> None:
        pooled[:] = [table(rows, offsets)]

    def call() -> None:
        before = weights.index_select(0, rows).view(torch.int32)
        pooled[0].backward(gradients)
        before ^= weights.index_select(0, rows).view(torch.int32)

    record = 4 * sizes.dimension + 4
    counted = sizes.touched * (8 + 4 * sizes.dimension + 9 * record)
    return GpuCase("fbgemm", sizes.touched, record, counted, call, forward)

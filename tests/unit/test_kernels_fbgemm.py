"""sparse_update against FBGEMM's CPU optimizers: one embedding table, several steps."""

import warnings

import pytest
import torch

from ecrm.kernels import native
from ecrm.kernels.sparse_update import sparse_update, state_widths

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tbe = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode

THEIR_NAMES = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
}
HEIGHT, TOUCHED, STEPS = 300, 120, 4


def run_both(optimizer, dimension, precision, lr, eps):
    """Weights and state, theirs and ours, after the same steps on the same rows and gradients."""
    theirs = tbe.SplitTableBatchedEmbeddingBagsCodegen(
        [(HEIGHT, dimension, EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)],
        optimizer=THEIR_NAMES[optimizer],
        learning_rate=lr,
        eps=eps,
        weights_precision=precision,
        pooling_mode=PoolingMode.SUM,
        output_dtype=SparseType.FP32,
    )
    random = torch.Generator().manual_seed(dimension)
    their_weights = theirs.split_embedding_weights()[0]
    their_weights.copy_(torch.randn(HEIGHT, dimension, generator=random) * 0.1)
    weights = their_weights.clone()
    state = [torch.zeros(HEIGHT, width) for width in state_widths(optimizer, dimension)]
    for _ in range(STEPS):
        rows = torch.randperm(HEIGHT, generator=random)[:TOUCHED]
        gradients = torch.randn(TOUCHED, dimension, generator=random)
        theirs(rows, torch.arange(TOUCHED + 1)).backward(gradients)
        sparse_update(weights, state, rows, gradients, optimizer, lr=lr, eps=eps, backend="cpu")
    their_state = (
        [] if optimizer == "sgd" else [theirs.split_optimizer_states()[0][0].reshape(HEIGHT, -1)]
    )
    return (their_weights, their_state), (weights, state)


@pytest.mark.parametrize("instruction_set", native.supported_instruction_sets())
@pytest.mark.parametrize("optimizer", THEIR_NAMES)
@pytest.mark.parametrize("dimension", [4, 8, 20, 64, 100, 128])
@pytest.mark.parametrize("lr, eps", [(0.05, 1e-8), (0.1, 1e-3)])
def test_float32_equals_fbgemm_to_the_bit(instruction_set, optimizer, dimension, lr, eps):
    with native.forced(instruction_set):
        (their_weights, their_state), (weights, state) = run_both(
            optimizer, dimension, SparseType.FP32, lr, eps
        )
    assert torch.equal(weights, their_weights)
    assert all(torch.equal(mine, its) for mine, its in zip(state, their_state))


@pytest.mark.parametrize("optimizer", THEIR_NAMES)
def test_float16_is_as_close_as_its_rounding(optimizer):
    """FBGEMM rounds a float16 step before it subtracts it.

    It also adds squares in another order: see README.md.
    """
    (their_weights, their_state), (weights, state) = run_both(
        optimizer, 64, SparseType.FP16, 0.05, 1e-8
    )
    torch.testing.assert_close(weights, their_weights, rtol=STEPS * 2.0**-10, atol=STEPS * 2.0**-14)
    for mine, its in zip(state, their_state):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-8)

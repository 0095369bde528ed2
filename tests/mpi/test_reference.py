"""Training compared with TorchRec: EmbeddingBagCollection and FBGEMM's optimizer in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.mpirunning import mpirun
from support.paths import PROGRAMS

STEPS, BATCH, DIM, RATE = 100, 64, 8, 0.05
PROGRAM = PROGRAMS / "save_tables.py"


def _ours(tmp_path: Path, data: Path, optimizer: str, arch: str) -> dict:
    sets = [f"data.path={data}", f"train.steps={STEPS}", f"train.sparse_optimizer={optimizer}"]
    sets += [
        f"train.sparse_lr={RATE}",
        "train.dense_optimizer=sgd",
        "train.dense_lr=0.1",
        f"model.dense_arch={arch}",
    ]
    output = mpirun(6, PROGRAM, "tiny", tmp_path / "ours.pt", *sets)
    assert (tmp_path / "ours.pt").exists(), output
    return torch.load(tmp_path / "ours.pt")


def _torchrec(data: Path, optimizer: str) -> dict:
    """TorchRec's DLRM over its fused EmbeddingBagCollection.

    It has the same model, initial values and batches.
    """
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.models.dlrm import DLRM
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    from ecrm.config import load_config
    from ecrm.data.dataset import CriteoDataset
    from ecrm.placement.tables import Table, row_spaces
    from ecrm.storage.initial_rows import InitialRows

    config = load_config("tiny", [f"data.path={data}"])
    model, seed = config.model, config.train.seed
    dataset = CriteoDataset.open(data, model.max_rows_per_table, 0.1)
    names = [name for name, _ in dataset.tables]
    kind, extra = {
        "rowwise_adagrad": (RowWiseAdagrad, {"eps": 1e-8}),
        "adagrad": (torch.optim.Adagrad, {"eps": 1e-8}),
        "sgd": (torch.optim.SGD, {}),
    }[optimizer]
    collection = FusedEmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=n, embedding_dim=DIM, num_embeddings=r, feature_names=[n])
            for n, r in dataset.tables
        ],
        optimizer_type=kind,
        optimizer_kwargs={"lr": RATE, **extra},
        device=torch.device("cpu"),
        location=EmbeddingLocation.HOST,
    )
    weights = {
        name.split(".")[-2]: weight
        for name, weight in collection.state_dict().items()
        if name.endswith(".weight")
    }
    (space,) = row_spaces([Table(n, rows, DIM) for n, rows in dataset.tables])
    for table, offset in zip(space.tables, space.offsets, strict=True):
        weights[table.name].copy_(
            InitialRows(space, seed)(torch.arange(offset, offset + table.rows))
        )
    torch.manual_seed(seed)
    dlrm = DLRM(collection, 13, list(model.bottom_mlp), list(model.top_mlp))
    dense_parameters = [*dlrm.dense_arch.parameters(), *dlrm.over_arch.parameters()]
    dense_optimizer = torch.optim.SGD(dense_parameters, lr=0.1)
    losses = []
    for step in range(STEPS):
        dense, ids, labels = dataset.train_batch(step * BATCH, BATCH)
        features = KeyedJaggedTensor.from_lengths_sync(
            keys=names,
            values=ids.t().reshape(-1),
            lengths=torch.ones(26 * BATCH, dtype=torch.int64),
        )
        dense_optimizer.zero_grad()
        logits = dlrm(dense, features).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        dense_optimizer.step()
        losses.append(float(loss.detach()))
    return {
        "losses": losses,
        "tables": weights,
        "dense": torch.cat([p.detach().reshape(-1) for p in dense_parameters]),
    }


@pytest.mark.parametrize(
    ("optimizer", "arch"),
    [
        ("rowwise_adagrad", "native"),
        pytest.param("rowwise_adagrad", "torchrec", marks=pytest.mark.drill),
        # Adagrad takes its first steps by the sign of a gradient, so that another rounding of one
        # near zero shows.
        pytest.param("adagrad", "torchrec", marks=pytest.mark.drill),
        pytest.param("sgd", "native", marks=pytest.mark.drill),
    ],
)
def test_protected_training_is_torchrecs(tmp_path, criteo_rows, optimizer, arch):
    """Losses of 100 steps and the final tables agree with one process to float tolerance."""
    ours, theirs = _ours(tmp_path, criteo_rows, optimizer, arch), _torchrec(criteo_rows, optimizer)
    assert len(ours["losses"]) == STEPS
    torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours["dense"], theirs["dense"], rtol=1e-3, atol=1e-4)
    assert set(ours["tables"]) == set(theirs["tables"])
    for name, rows in ours["tables"].items():
        torch.testing.assert_close(rows, theirs["tables"][name], rtol=1e-3, atol=1e-4)

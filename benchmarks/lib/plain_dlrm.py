"""TorchRec's DLRM, its tables and its batches, from an ECRM config: what benchmarks train of it.

Legend: B samples of a slot, T tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecrm.config import Config
from ecrm.data.dataset import CriteoDataset
from ecrm.recipes.train import EPSILON


def open_dataset(config: Config) -> CriteoDataset:
    """The dataset of a config."""
    return CriteoDataset.open(
        config.data.path, config.model.max_rows_per_table or None, config.data.eval_fraction
    )


def tables_of(config: Config, dataset: CriteoDataset) -> list[EmbeddingBagConfig]:
    """TorchRec's configs of the tables, a feature each."""
    return [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=config.model.embedding_dim,
            num_embeddings=rows,
            feature_names=[name],
        )
        for name, rows in dataset.tables
    ]


def plain_dlrm(config: Config, tables: list[EmbeddingBagConfig]) -> DLRM:
    """The model: tables on the meta device, with their optimizer; dense parts as ECRM's begin."""
    torch.manual_seed(config.train.seed)
    bags = EmbeddingBagCollection(tables, device=torch.device("meta"))
    model = DLRM(
        bags,
        13,
        list(config.model.bottom_mlp),
        list(config.model.top_mlp),
        dense_device=torch.device("cpu"),
    )
    apply_optimizer_in_backward(
        RowWiseAdagrad,
        bags.parameters(),
        {"lr": config.train.sparse_lr, "eps": config.train.sparse_eps},
    )
    return model


def dense_adagrad(config: Config, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of all that is no table, in the fastest of torch's three forms on CPUs.

    With the dense-heavy model's layers, it takes a third of the time of the default.
    """
    return torch.optim.Adagrad(parameters, lr=config.train.dense_lr, eps=EPSILON, fused=True)


def read_batch(
    dataset: CriteoDataset, config: Config, step: int, slot: int, slots: int, ids_per_bag: int = 1
) -> Batch:
    """A slot's part of a step: dense float32 [B, 13], bags of T tables, labels float32 [B].

    One id per bag gives the rows that a config's run reads. Otherwise each sample takes as many
    successive rows: all their ids, and dense features and label of the first one.
    """
    rows = config.train.global_batch * ids_per_bag
    dense, ids, labels = dataset.batch_for(step, slot, slots, rows)
    dense, labels = dense[::ids_per_bag].contiguous(), labels[::ids_per_bag].contiguous()
    lengths = torch.full((len(labels) * ids.shape[1],), ids_per_bag, dtype=torch.int32)
    names = [name for name, _ in dataset.tables]
    return Batch(dense, KeyedJaggedTensor(names, ids.t().reshape(-1), lengths=lengths), labels)


def check(program: str, config: Config, slots: int) -> None:
    """End the program where the config asks for what is not done here."""
    train = config.train
    for key, value, only in (
        ("train.sparse_optimizer", train.sparse_optimizer, "rowwise_adagrad"),
        ("train.dense_optimizer", train.dense_optimizer, "adagrad"),
        ("train.global_batch modulo the slots", train.global_batch % slots, 0),
    ):
        if value != only:
            sys.exit(f"{program}: {key} is {value}: it can only be {only}")

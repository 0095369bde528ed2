"""A model of any prepared table: every feature has a table of rows, below one MLP.

    python examples/make_visits.py visits
    ecrm schema visits/*.parquet > visits.toml
    ecrm prepare table visits/*.parquet --schema visits.toml --output datasets/visits
    ecrm launch examples/train_columns.py --servers 4 --trainers 2 --kill 1@60 -- datasets/visits

Tables, sizes and names come from `ecrm.Table`; labels are 0 or 1. In one process, without
protection: `python examples/train_columns.py datasets/visits`.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from torchrec.datasets.utils import Batch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import ecrm
from ecrm.data.metrics import auc

parser = argparse.ArgumentParser()
parser.add_argument("data", help="folder of `ecrm prepare table`")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--output", default="model.safetensors", help="file for the trained model")
typed = parser.parse_args()
SLOTS, BATCH, DIM = 2, 128, 16


class Model(nn.Module):
    """Pooled rows of all features and the dense columns, under an MLP: a logit for each sample."""

    def __init__(self, table: ecrm.Table) -> None:
        super().__init__()
        self.plain, self.weighted = None, None
        features = [name for names in table.features.values() for name in names]
        plain = [name for name in features if name not in table.weighted]
        if plain:
            self.plain = self.bags(table, plain, PoolingType.MEAN)
        if table.weighted:
            self.weighted = self.bags(table, table.weighted, PoolingType.SUM)
        self.norm = nn.BatchNorm1d(len(table.dense)) if table.dense else nn.Identity()
        self.mlp = nn.Sequential(
            nn.Linear(DIM * len(features) + len(table.dense), 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def bags(
        self, table: ecrm.Table, features: list[str], pooling: PoolingType
    ) -> EmbeddingBagCollection:
        configs = [
            EmbeddingBagConfig(
                name=f"{name}_weighted" if pooling == PoolingType.SUM else name,
                num_embeddings=table.rows[name],
                embedding_dim=DIM,
                feature_names=[feature for feature in names if feature in features],
                pooling=pooling,
            )
            for name, names in table.features.items()
            if set(names) & set(features)
        ]
        return EmbeddingBagCollection(
            tables=configs,
            is_weighted=pooling == PoolingType.SUM,
            device=torch.device("meta"),
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        collections = [bags for bags in (self.plain, self.weighted) if bags is not None]
        rows = [bags(batch.sparse_features).values() for bags in collections]
        dense = self.norm(batch.dense_features)
        return self.mlp(torch.cat([*rows, dense], dim=1)).squeeze(1)


table = ecrm.Table(typed.data)
torch.manual_seed(0)  # of the layers' first weights
model = Model(table)
for bags in (model.plain, model.weighted):
    if bags is not None:
        apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.1})
session = ecrm.Session(
    model, slots=SLOTS, dense_optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-3)
)

batches = ecrm.Indexed(table.train, BATCH, table.collate)
for batch in session.steps(batches, typed.steps):
    loss = F.binary_cross_entropy_with_logits(session.model(batch), batch.labels)
    loss.backward()
    session.log(loss=loss)

if len(table.held_out):
    session.model.eval()
    for batch in session.eval_batches(ecrm.Indexed(table.held_out, 1000, table.collate)):
        session.gather(scores=session.model(batch), labels=batch.labels)
    if session.is_main:
        found = {name: tensor.numpy() for name, tensor in session.gathered.items()}
        score = auc(found["labels"], found["scores"])
        shown = "none, their labels are all equal" if score is None else f"{score:.4f}"
        print(f"AUC of held-out rows: {shown} (0.5 by guessing)")
session.save(typed.output)

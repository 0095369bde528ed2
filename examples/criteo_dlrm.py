"""TorchRec's DLRM on Criteo rows, with tables that survive killed ranks.

    make dataset
    ecrm launch examples/criteo_dlrm.py --kill 1@60 -- datasets/generated-200000-...

The model and its loss are TorchRec's and torch's own. What protects it is the session.
"""

import argparse

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import ecrm
from ecrm.data.dataset import CriteoDataset

parser = argparse.ArgumentParser()
parser.add_argument("data", help="folder of a prepared dataset")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--max-rows", type=int, default=200_000, help="the most rows of a table")
parser.add_argument("--output", default="model.safetensors", help="file for the trained model")
typed = parser.parse_args()
SLOTS, BATCH, DIM = 2, 256, 16

data = CriteoDataset.open(typed.data, typed.max_rows)
names = [name for name, _ in data.tables]

torch.manual_seed(0)  # of the layers' first weights
model = DLRM(
    EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name]
            )
            for name, rows in data.tables
        ],
    ),
    dense_in_features=13,
    dense_arch_layer_sizes=[64, DIM],
    over_arch_layer_sizes=[64, 1],
)
apply_optimizer_in_backward(
    RowWiseAdagrad, model.sparse_arch.embedding_bag_collection.parameters(), {"lr": 0.05}
)


def batch(step: int, slot: int) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    """Dense features, one id per feature, and labels: decided by step and slot alone."""
    dense, ids, labels = data.batch_for(step, slot, SLOTS, SLOTS * BATCH)
    lengths = torch.ones(ids.numel(), dtype=torch.int64)
    return dense, KeyedJaggedTensor(names, ids.t().reshape(-1), lengths=lengths), labels


session = ecrm.Session(
    model,
    slots=SLOTS,
    seed=0,
    dense_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    scheduler=lambda optimizer: CosineAnnealingLR(optimizer, typed.steps),
    before_step=lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
)
for dense, ids, labels in session.steps(batch, typed.steps):
    dense, labels = dense.to(session.device), labels.to(session.device)  # as train.device says
    loss = F.binary_cross_entropy_with_logits(session.model(dense, ids).squeeze(1), labels)
    loss.backward()
    session.log(loss=loss)
session.save(typed.output)

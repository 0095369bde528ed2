"""Schedules of both learning rates: of the layers, and of the rows."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm

STEPS = 60


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        config = EmbeddingBagConfig(
            name="t_item", num_embeddings=1000, embedding_dim=8, feature_names=["item"]
        )
        self.bags = EmbeddingBagCollection([config], device=torch.device("meta"))
        self.layer = nn.Linear(8, 1)

    def forward(self, ids):
        return self.layer(self.bags(ids).values()).squeeze(1)


def batch(step, slot):
    ids = torch.randint(1000, (256,), generator=torch.Generator().manual_seed(2 * step + slot))
    return KeyedJaggedTensor(["item"], ids, lengths=torch.ones(256, dtype=torch.int64))


torch.manual_seed(0)  # of the layer's first weights
model = Model()
apply_optimizer_in_backward(torch.optim.Adagrad, model.bags.parameters(), {"lr": 0.3})
session = ecrm.Session(
    model,
    slots=2,
    dense_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    scheduler=lambda optimizer: LinearLR(optimizer, start_factor=0.1, total_iters=20),
    sparse_scheduler=lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
)


def told(finished, logged):
    if session.is_main and finished in (1, STEPS):
        print(f"step {finished}: loss {logged[0]['loss']:.3f}")


session.on_commit(told)
for ids in session.steps(batch, STEPS):
    loss = F.binary_cross_entropy_with_logits(session.model(ids), (ids.values() % 3 == 0).float())
    loss.backward()
    session.log(loss=loss)

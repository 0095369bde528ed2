"""A script in which one slot hangs for ever on the first rank that tries it."""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import ecrm

tried = Path(sys.argv[1])
table = EmbeddingBagConfig(name="songs", embedding_dim=8, num_embeddings=50, feature_names=["item"])
bags = EmbeddingBagCollection(device=torch.device("meta"), tables=[table])
model = nn.ModuleDict({"bags": bags, "over": nn.Linear(8, 1)})
apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.1})
session = ecrm.Session(
    model, slots=2, dense_optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), check_determinism=0
)


def batch(step: int, slot: int) -> tuple[int, int, KeyedJaggedTensor]:
    ids = torch.tensor([step % 50, slot])
    return step, slot, KeyedJaggedTensor.from_lengths_sync(["item"], ids, torch.tensor([2]))


for step, slot, features in session.steps(batch, steps=6):
    model["over"](model["bags"](features).values()).sum().backward()
    if (step, slot) == (3, 1) and not tried.exists():
        tried.touch()
        while True:
            time.sleep(1)

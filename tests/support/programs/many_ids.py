"""A script for `ecrm launch`: bags of many ids in six tables, which servers may sum.

Argument: STEPS.
"""

import sys

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import ecrm

KEYS = [f"f{number}" for number in range(6)]
ROWS, SAMPLES, IDS = 2_000, 32, 12


def batch(step: int, slot: int) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(1000 * step + slot)
    ids = torch.randint(ROWS, (len(KEYS) * SAMPLES * IDS,), generator=random)
    return KeyedJaggedTensor(KEYS, ids, lengths=torch.full((len(KEYS) * SAMPLES,), IDS))


tables = [
    EmbeddingBagConfig(name=f"t_{key}", num_embeddings=ROWS, embedding_dim=16, feature_names=[key])
    for key in KEYS
]
model = EmbeddingBagCollection(tables, device=torch.device("meta"))
apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
session = ecrm.Session(model, slots=2, seed=4)
for ids in session.steps(batch, steps=int(sys.argv[1])):
    loss = session.model(ids).values().sin().sum(1).square().mean()
    loss.backward()
    session.log(loss=loss)

"""A session of summed, mean and sequence tables, for tests of two bytes on the wire."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from ecrm.protection.erasure import ErasureProtection
from ecrm.session.session import Session
from support.sessions import Layout

STEPS, SAMPLES, DIM, SLOTS = 6, 8, 16, 3
SUMS = {"a": 60, "b": 60, "c": 7, "d": 60, "e": 60}
"""Rows of the tables of summed bags; means, weighted and sequence tables have 40 rows each."""


def batch_of(step, slot):
    random = torch.Generator().manual_seed(100 * step + slot)
    keys, rows = [*SUMS, "mean", "word"], [*SUMS.values(), 40, 40]
    lengths = torch.randint(0, 9, (len(keys), SAMPLES), generator=random)
    ids = [
        torch.randint(0, count, (int(each.sum()),), generator=random)
        for count, each in zip(rows, lengths)
    ]
    return KeyedJaggedTensor(keys, torch.cat(ids), lengths=lengths.view(-1))


class Model(nn.Module):
    """Sums, means and rows themselves."""

    def __init__(self, device):
        super().__init__()
        bags = [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name]
            )
            for name, rows in SUMS.items()
        ]
        mean = EmbeddingBagConfig(
            name="mean",
            num_embeddings=40,
            embedding_dim=DIM // 2,
            feature_names=["mean"],
            pooling=PoolingType.MEAN,
        )
        self.bags = EmbeddingBagCollection(tables=[*bags, mean], device=device)
        word = EmbeddingConfig(
            name="word", num_embeddings=40, embedding_dim=DIM // 2, feature_names=["word"]
        )
        self.words = EmbeddingCollection(tables=[word], device=device)
        self.top = nn.Linear(DIM * 11 // 2, 1)

    def forward(self, ids):
        words = self.words(ids)["word"].values()
        return self.top(self.bags(ids).values()).sin().square().mean() + words.sin().square().mean()


def first_state():
    random = torch.Generator().manual_seed(9)
    shapes = {f"bags.embedding_bags.{name}.weight": (rows, DIM) for name, rows in SUMS.items()}
    shapes["bags.embedding_bags.mean.weight"] = (40, DIM // 2)
    shapes["words.embeddings.word.weight"] = (40, DIM // 2)
    shapes |= {"top.weight": (1, DIM * 11 // 2), "top.bias": (1,)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def script(wire_dtype=torch.bfloat16, steps=STEPS):
    def train(start):
        torch.manual_seed(7)
        module = Model(torch.device("meta"))
        apply_optimizer_in_backward(torch.optim.SGD, module.bags.parameters(), {"lr": 0.3})
        apply_optimizer_in_backward(torch.optim.SGD, module.words.parameters(), {"lr": 0.3})
        session = Session(
            module,
            slots=SLOTS,
            seed=3,
            dense_optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
            wire_dtype=wire_dtype,
            start=start,
        )
        session.load_state_dict(first_state())
        session.delivered = []
        session.on_commit(lambda step, logged: session.delivered.append((step, logged)))
        for ids in session.steps(batch_of, steps):
            loss = session.model(ids)
            loss.backward()
            session.log(loss=loss)
        return session

    return train


LAYOUT = Layout(
    slots=SLOTS,
    servers=3,
    trainers=1,
    spares=0,
    protection=lambda servers: ErasureProtection(servers, 2, 1),
)
"""Four ranks."""

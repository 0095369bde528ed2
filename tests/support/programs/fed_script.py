"""A training script whose batches take a while to make: `fed_script.py KIND WORKERS`.

KIND is "indexed", "made" for a dataset made by a function, or "streams"; each slot's stream ends at
another step, the last after 40. A rank that makes the dataset leaves a file `made-RANK`.
"""

import sys
import time
from pathlib import Path

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm

KIND, WORKERS = sys.argv[1], int(sys.argv[2])
ROWS, BATCH, STEPS, SECONDS = 1000, 64, 40, 0.02


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        self.over = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())
        self.last = torch.nn.Linear(16, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.last(self.over(self.bags(ids).values())).squeeze(1)


def collate(samples: list[int]) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    time.sleep(SECONDS)
    ids = torch.tensor(samples) % ROWS
    noise = torch.rand(len(samples))
    kjt = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(samples), dtype=torch.int64))
    return kjt, (ids % 7 == 0).float() * 0.9 + 0.1 * noise


class Samples:
    """Batches of consecutive samples, `count` of them."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count, self.at = first, count, 0

    def __iter__(self):
        while self.at < self.count:
            begin = self.first + self.at * BATCH
            self.at += 1
            yield collate(list(range(begin, begin + BATCH)))

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


model = Model()
apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.5})
session = ecrm.Session(
    model, slots=2, dense_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01)
)


def make() -> range:
    Path(f"made-{session.rank}").touch()
    return range(5000)


if KIND == "indexed":
    data, steps = ecrm.Indexed(range(5000), BATCH, collate, workers=WORKERS), STEPS
elif KIND == "made":
    data, steps = ecrm.Indexed(make, BATCH, collate, workers=WORKERS, size=5000), STEPS
else:
    data = ecrm.Streams(lambda slot: Samples(50_000 * slot, STEPS - 15 * slot), workers=WORKERS)
    steps = 1000
for ids, label in session.steps(data, steps):
    loss = torch.nn.functional.mse_loss(session.model(ids), label)
    loss.backward()
    session.log(loss=loss)

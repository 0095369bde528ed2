"""A small training script with one bad sample, which a batch of step 5, slot 1 has.

Arguments: [--raises PLACE] or [--kills PLACE], where PLACE is `body`, `collate`, `before_step`, or
`every` for a function on the main rank, and [--once FILE]: only where the file is not there yet,
which is made then.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm

STEPS, SLOTS, BATCH, BAD = 10, 2, 4, 46

parser = argparse.ArgumentParser()
parser.add_argument("--raises")
parser.add_argument("--kills")
parser.add_argument("--once", type=Path)
typed = parser.parse_args()


def look_at(numbers: list[int], place: str) -> None:
    if BAD not in numbers or place not in (typed.raises, typed.kills):
        return
    if typed.once is not None:
        try:
            typed.once.touch(exist_ok=False)
        except FileExistsError:
            return
    if place == typed.kills:
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("no such sample")


def look_before_step(parameters: list[nn.Parameter]) -> None:
    if session.step == 5:
        look_at([BAD], "before_step")


def collate(numbers: list[int]) -> KeyedJaggedTensor:
    look_at(numbers, "collate")
    return KeyedJaggedTensor(["f"], torch.tensor(numbers), lengths=torch.ones(BATCH).long())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", num_embeddings=200, embedding_dim=8, feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection([table], device=torch.device("meta"))
        self.layer = nn.Linear(8, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.layer(self.bags(ids).values()).squeeze(1)


model = Model()
apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.1})
session = ecrm.Session(
    model,
    slots=SLOTS,
    dense_optimizer=lambda ps: torch.optim.Adam(ps, lr=0.01),
    before_step=look_before_step,
)


@session.every(5)
def look_between_steps() -> None:
    if session.is_main:
        look_at([BAD], "every")


numbers = ecrm.Indexed(range(200), batch_size=BATCH, collate=collate, shuffle=False)
for batch in session.steps(numbers, STEPS):
    look_at(batch.values().tolist(), "body")
    (session.model(batch) - 1.0).square().mean().backward()

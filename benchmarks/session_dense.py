"""A session whose dense part is compiled, or runs in bfloat16.

    ecrm launch benchmarks/session_dense.py --servers 3 --trainers 2 --spares 0 -k 2 -m 1 \\
        [--kill 3@20 --kill 1@30] -- [--compile] [--bf16]

A DLRM's dense part without interaction: MLPs over 13 numbers and 8 pooled rows of 32 floats, 512
samples a slot. Every trainer prints the CPU time of a slot's dense forward and backward, the median
of the second half of its steps. The finished model has the same bits with and without kills.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm

parser = argparse.ArgumentParser()
parser.add_argument("--compile", action="store_true", help="by torch.compile")
parser.add_argument("--bf16", action="store_true", help="under torch.autocast")
parser.add_argument("--steps", type=int, default=40)
typed = parser.parse_args()
TABLES, ROWS, DIM, SAMPLES, NUMBERS = 8, 2000, 32, 512, 13
NAMES = [f"f{table}" for table in range(TABLES)]


class Dense(nn.Module):
    """MLPs over the numbers, then over their result and the pooled rows."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(NUMBERS, 256), nn.ReLU(), nn.Linear(256, DIM), nn.ReLU()
        )
        self.top = nn.Sequential(
            nn.Linear(DIM * (TABLES + 1), 512),
            nn.ReLU(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        )

    def forward(self, numbers: Tensor, pooled: Tensor) -> Tensor:
        """Return a logit for each sample, [B, 1]."""
        logits: Tensor = self.top(torch.cat([self.bottom(numbers), pooled], 1))
        return logits


def batch(step: int, slot: int) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """Numbers, ids and labels of a slot."""
    generator = torch.Generator().manual_seed(2 * step + slot)
    ids = torch.randint(ROWS, (TABLES * SAMPLES,), generator=generator)
    numbers = torch.randn(SAMPLES, NUMBERS, generator=generator)
    labels = (numbers[:, 0] + ids[:SAMPLES] % 3 > 1).float()
    return numbers, KeyedJaggedTensor(NAMES, ids, lengths=torch.ones_like(ids)), labels


tables = [
    EmbeddingBagConfig(
        num_embeddings=ROWS, embedding_dim=DIM, name=f"t{table}", feature_names=[name]
    )
    for table, name in enumerate(NAMES)
]
bags, dense = EmbeddingBagCollection(tables=tables, device=torch.device("meta")), Dense()
apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.05})
if typed.compile:
    dense.compile()
session = ecrm.Session(
    nn.ModuleDict({"bags": bags, "dense": dense}),
    slots=2,
    dense_optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
)
taken = []
for numbers, ids, labels in session.steps(batch, typed.steps):
    pooled = session.model["bags"](ids).values()
    began = time.process_time()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=typed.bf16):
        logits = session.model["dense"](numbers, pooled)
    loss = binary_cross_entropy_with_logits(logits.float().squeeze(1), labels)
    loss.backward()
    taken.append(time.process_time() - began)
    session.log(loss=loss)
if taken:
    of_half = statistics.median(taken[len(taken) // 2 :])
    print(f"dense part of a slot: {1000 * of_half:.2f} ms of CPU", flush=True)
session.save("model.pt")

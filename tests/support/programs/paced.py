"""A script with long steps until a file is there: paced.py STEPS FILE [FILE ...].

So a drill takes as long as it needs, and the rest of the training is short. While there is a file
with the same name and the suffix .hold, the step in hand goes on. The model is saved beside the
file, with the suffix .safetensors. Every further file is a further session, which trains the dense
part of the session before.
"""

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

STEPS, FILES = int(sys.argv[1]), [Path(word) for word in sys.argv[2:]]
SLOTS, ROWS, STEP_SECONDS = 2, 3000, 0.25


def ids(step: int, slot: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    random = torch.Generator().manual_seed(100 * step + slot)
    lengths = torch.randint(0, 4, (64,), generator=random)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=random)
    return KeyedJaggedTensor(["item"], values, lengths=lengths), torch.rand(64, generator=random)


table = EmbeddingBagConfig(
    name="songs", embedding_dim=8, num_embeddings=ROWS, feature_names=["item"]
)
torch.manual_seed(0)
over = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 1))
for hurry in FILES:
    bags = EmbeddingBagCollection(device=torch.device("meta"), tables=[table])
    apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.1})
    session = ecrm.Session(
        nn.ModuleDict({"bags": bags, "over": over}),
        slots=SLOTS,
        dense_optimizer=lambda ps: torch.optim.Adam(ps, lr=0.01),
    )

    @session.every(25)
    def evaluate(session=session):
        session.model.eval()
        for features, _ in session.eval_batches([ids(10**6, number) for number in range(4)]):
            session.model["over"](session.model["bags"](features).values())
        session.model.train()

    for features, label in session.steps(ids, STEPS):
        score = session.model["over"](session.model["bags"](features).values()).squeeze(1)
        (score - label).square().mean().backward()
        if not hurry.exists():
            time.sleep(STEP_SECONDS / SLOTS)
        while hurry.with_suffix(".hold").exists():
            time.sleep(0.02)
    session.save(hurry.with_suffix(".safetensors"))

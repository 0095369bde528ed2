"""Three sessions, one after the other: python two_sessions.py [NUMBER:STEP=RANK ...].

Rank RANK kills itself at commit STEP of session NUMBER. The first session begins with
begun.pt. The second learns from the dense part of the first, begins with a copy of its first
layer, and saves over that file as well. The third begins with the model that the second has saved.
"""

import copy
import os
import signal
import sys

import torch
import torchrec
from torch import nn
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import ecrm

ROWS, SAMPLES, STEPS = 300, 16, 20


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        tables = [
            torchrec.EmbeddingBagConfig(
                name=f"t_{name}", num_embeddings=ROWS, embedding_dim=8, feature_names=[name]
            )
            for name in "ab"
        ]
        self.bags = torchrec.EmbeddingBagCollection(tables, device=torch.device("meta"))
        apply_optimizer_in_backward(RowWiseAdagrad, self.bags.parameters(), {"lr": 0.1})
        self.dense = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, ids):
        return self.dense(self.bags(ids).values())


def batch_of(step, slot):
    random = torch.Generator().manual_seed(step * 100 + slot)
    ids = torch.randint(0, ROWS, (2 * SAMPLES,), generator=random)
    ones = torch.ones(2 * SAMPLES, dtype=torch.int64)
    return torchrec.KeyedJaggedTensor(["a", "b"], ids, lengths=ones)


def main():
    torch.manual_seed(0)
    kills = dict(word.split("=") for word in sys.argv[1:])
    rank = os.environ.get("OMPI_COMM_WORLD_RANK")
    teacher = None
    for number, rate in enumerate((0.01, 0.001, 0.1), 1):
        model = Model()
        if teacher is not None:
            model.dense[0] = copy.deepcopy(teacher.dense[0])
        session = ecrm.Session(
            model, slots=4, dense_optimizer=lambda ps, rate=rate: torch.optim.Adam(ps, rate)
        )
        if number != 2:
            session.load({1: "begun.pt", 3: "model_2.safetensors"}[number])

        @session.on_commit
        def committed(finished, logged, number=number):
            if kills.get(f"{number}:{finished - 1}") == rank:
                os.kill(os.getpid(), signal.SIGKILL)

        for batch in session.steps(batch_of, STEPS):
            pooled = session.model.bags(batch).values()
            found = session.model.dense(pooled)
            if teacher is not None:
                with torch.no_grad():
                    goal = teacher.dense(pooled)
                found = found - goal
            found.square().mean().backward()
        teacher = session.model.eval() if number == 1 else None
        session.save(f"model_{number}.safetensors")
        if number == 2:
            session.save("begun.pt")
        if session.is_main:
            print(f"session {number} is through", flush=True)


main()

"""A script that says where it is, in files, so that somebody can kill a rank there."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import ecrm

STEPS, EVERY, ROWS = 16, 4, 3000
folder = Path(sys.argv[1])


def at(phase: str) -> None:
    """This rank has come to a phase; the first time counts."""
    (folder / f"at-{phase}-{session.rank}").touch()


def ids(step: int, slot: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    random = torch.Generator().manual_seed(100 * step + slot)
    lengths = torch.randint(0, 4, (64,), generator=random)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=random)
    return KeyedJaggedTensor(["item"], values, lengths=lengths), torch.rand(64, generator=random)


table = EmbeddingBagConfig(
    name="songs", embedding_dim=8, num_embeddings=ROWS, feature_names=["item"]
)
bags = EmbeddingBagCollection(device=torch.device("meta"), tables=[table])
model = nn.ModuleDict({"bags": bags, "over": nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 1))})
apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.1})
session = ecrm.Session(
    model, slots=2, dense_optimizer=lambda ps: torch.optim.Adam(ps, lr=0.01), check_determinism=0
)
if (folder / "began.pt").exists():
    session.load(folder / "began.pt")


def log(step, logged) -> None:
    if session.is_main:
        with (folder / "log.csv").open("a") as file:
            file.write(f"{step},{logged[0]['loss']},{logged[1]['loss']}\n")


session.on_commit(log)


@session.every(EVERY)
def evaluate() -> None:
    session.model.eval()
    for features, label in session.eval_batches([ids(1000, number) for number in range(6)]):
        if session.step == 2 * EVERY:
            at("evaluation")
        score = session.model["over"](session.model["bags"](features).values()).squeeze(1)
        session.gather(score=score, label=label)
    if session.step == 3 * EVERY:
        at("save")
    session.save(folder / f"model-{session.step}.safetensors")


for features, label in session.steps(ids, STEPS):
    if session.step == 6:
        at("step")
    if session.step == 8:
        at("checkpoint")  # that of step 8 is being written
    scores = session.model["over"](session.model["bags"](features).values()).squeeze(1)
    loss = F.mse_loss(scores, label)
    loss.backward()
    session.log(loss=loss)
at("exit")
session.save(folder / "last.pt")

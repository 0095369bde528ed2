"""A training script whose batches take as long to make as the loop's body: `slow_data_script.py`.

It writes to the folder it runs in: `ranks/RANK` the pid of a rank, `workers/PARENT-PID` a file for
each process that makes batches, `fds/RANK-STEP` how many descriptors a rank has, `left/RANK` the
workers of dead ranks that live on, `waits/RANK` how many seconds each batch of the evaluation has
taken to come.
"""

import json
import os
import time
from pathlib import Path

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import ecrm

ROWS, BATCH, STEPS, SECONDS = 1000, 64, 24, 0.06


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        self.last = torch.nn.Linear(8, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.last(self.bags(ids).values()).squeeze(1)


def note(folder: str, name: object, text: object = "") -> None:
    Path(folder).mkdir(exist_ok=True)
    Path(folder, str(name)).write_text(str(text))


def collate(samples: list[int]) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    note("workers", f"{os.getppid()}-{os.getpid()}")
    time.sleep(SECONDS)
    ids = torch.tensor(samples) % ROWS
    kjt = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(samples), dtype=torch.int64))
    return kjt, (ids % 7 == 0).float()


def orphans() -> list[str]:
    """The workers whose parents have gone, and that have not."""
    pairs = [path.name.split("-") for path in Path("workers").iterdir()]
    there = [worker for parent, worker in pairs if not Path("/proc", parent).exists()]
    return [worker for worker in there if runs(worker)]


def runs(worker: str) -> bool:
    """Whether a process is there, and not only not yet buried by whoever has inherited it."""
    try:
        return Path("/proc", worker, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


model = Model()
apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.5})
session = ecrm.Session(
    model, slots=2, dense_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01)
)


@session.every(3)
def look() -> None:
    rank, step = session.rank, session.step
    note("ranks", rank, os.getpid())
    note("fds", f"{rank}-{step}", len(os.listdir("/proc/self/fd")))


for ids, label in session.steps(ecrm.Indexed(range(5000), BATCH, collate, workers=3), STEPS):
    torch.nn.functional.mse_loss(session.model(ids), label).backward()
    time.sleep(SECONDS)

note("left", session.rank, json.dumps(orphans()))
waits, since = [], time.perf_counter()
for ids, label in session.eval_batches(ecrm.Indexed(range(12 * BATCH), BATCH, collate, workers=3)):
    waits.append(time.perf_counter() - since)
    session.gather(score=session.model(ids), label=label)
    time.sleep(SECONDS)
    since = time.perf_counter()
note("waits", session.rank, json.dumps(waits))

"""A script that starts processes, leaves files open, has handlers, and asks who listens."""

import atexit
import gzip
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import ecrm


def listening() -> list[str]:
    """Local addresses of this process's TCP sockets that listen."""
    own = {os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _is_open(n)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                found.append(words[1])
    return found


def _is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def ended_by_sigterm() -> list[int]:
    """How a process and a fork of this one end that get SIGTERM."""
    sleeper = subprocess.Popen(["sleep", "100"])
    sleeper.terminate()
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    fork.start()
    fork.terminate()
    fork.join(20)
    return [sleeper.wait(20), fork.exitcode]


def write_late(path: Path) -> None:
    time.sleep(0.5)
    path.write_text("through")


mode, folder = sys.argv[1], Path(sys.argv[2])
before = open(folder / f"before-{os.environ['OMPI_COMM_WORLD_RANK']}.csv", "w")


class Ended:
    """Says in a file that it has ended; `me` makes a cycle, which only a collection ends."""

    def __init__(self, file: Path) -> None:
        self.file, self.me = file, self

    def __del__(self) -> None:
        self.file.write_text("ended")


class Holding:
    """Holds an open file in a cycle."""

    def __init__(self, file: Path) -> None:
        self.file, self.me = open(file, "w"), self


if mode == "ends cycles":
    cycle = Ended(folder / f"cycle-{os.environ['OMPI_COMM_WORLD_RANK']}")
holding = Holding(folder / f"holding-{os.environ['OMPI_COMM_WORLD_RANK']}.csv")
holding.file.write("held")
table = EmbeddingBagConfig(name="songs", embedding_dim=8, num_embeddings=50, feature_names=["item"])
model = nn.ModuleDict(
    {
        "bags": EmbeddingBagCollection(device=torch.device("meta"), tables=[table]),
        "over": nn.Linear(8, 1),
    }
)
apply_optimizer_in_backward(RowWiseAdagrad, model["bags"].parameters(), {"lr": 0.1})
session = ecrm.Session(
    model, slots=1, dense_optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), check_determinism=0
)


def batch(step: int, slot: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(
        ["item"], torch.tensor([hash("word") % 50]), torch.tensor([1])
    )


for features in session.steps(batch, steps=4):
    model["over"](model["bags"](features).values()).sum().backward()

rank = session.rank
asked = {
    "hash": hash("word"), "listening": listening(), "ended": ended_by_sigterm(),
    "cwd": os.getcwd(),
}  # fmt: skip
(folder / f"asked-{rank}.json").write_text(json.dumps(asked))
rows = open(folder / f"rows-{rank}.csv", "w")
packed = gzip.open(folder / f"rows-{rank}.gz", "wt")
threading.Thread(target=write_late, args=(folder / f"thread-{rank}",)).start()
archive = zipfile.ZipFile(folder / f"rows-{rank}.zip", "w")
archive.writestr("rows", "all")
short_lived = tempfile.NamedTemporaryFile(prefix="short-lived-", dir=folder)
for number in range(900):
    before.write(f"{number}\n")
    rows.write(f"{number}\n")
    packed.write(f"{number}\n")
atexit.register((folder / f"handled-{rank}").write_text, "handled")
if mode == "fails slowly" or (mode == "hangs" and session.is_main):
    atexit.register(time.sleep, 1000)
if mode == "fails unevenly" and not session.is_main:
    atexit.register(time.sleep, 3)
if mode.startswith("fails"):
    raise ValueError("after its training")

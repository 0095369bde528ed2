"""Messages as arrays, as from 32 ranks on: four ranks get the same bits, with kills, too."""

from __future__ import annotations

from pathlib import Path

from support.commands import ecrm
from support.drilling import Run
from support.examples import dead_ranks

SCRIPT = """\
import sys
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
import ecrm
from ecrm.transport import outbox


def batch(step, slot):
    draw = torch.Generator().manual_seed(2 * step + slot)
    ids = torch.randint(1000, (256,), generator=draw)
    return KeyedJaggedTensor(["item"], ids, lengths=torch.ones(256).long()), (ids % 3 == 0).float()


outbox.MANY = int(sys.argv[1])
table = EmbeddingBagConfig(num_embeddings=1000, embedding_dim=16, name="t", feature_names=["item"])
model = EmbeddingBagCollection([table], device=torch.device("meta"))
apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), {"lr": 1.0})
session = ecrm.Session(model, slots=2)
for ids, labels in session.steps(batch, steps=40):
    loss = torch.nn.BCEWithLogitsLoss()(session.model(ids).values().sum(1), labels)
    loss.backward()
session.save("model.pt")
"""
LAYOUT = ("--servers", "3", "--trainers", "2", "--spares", "1", "-k", "2", "-m", "1")


def train(folder: Path, many: int, *words: str) -> Run:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    line = ("launch", "train.py", *LAYOUT, "--run-dir", "run", *words)
    done = ecrm(*line, "--", str(many), cwd=folder, timeout=300)
    return Run(done.returncode, done.stdout + done.stderr, folder / "run")


def test_arrays_and_objects_give_one_model_with_and_without_kills(tmp_path):
    objects = train(tmp_path / "objects", 1000)
    arrays = train(tmp_path / "arrays", 1, "--kill", "1@9:parity", "--kill", "4@20")
    assert objects.code == arrays.code == 0, objects.output + arrays.output
    assert (dead_ranks(objects), dead_ranks(arrays)) == ([], [1, 4])
    assert arrays.model == objects.model

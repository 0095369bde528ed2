"""The example script under mpirun: a kill changes no bit, and its model is TorchRec's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from shutil import copy

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM

from ecrm.checkpoint.model_file import read_safetensors
from ecrm.data.dataset import CriteoDataset
from support.commands import ecrm
from support.drilling import Run
from support.examples import EXAMPLES, dead_ranks, run_example
from support.paths import PROGRAMS
from support.programs import loading

SCRIPT = EXAMPLES / "criteo_dlrm.py"
STEPS = 30
TWO_RANKS = ("--servers", "1", "--trainers", "1", "--spares", "0", "--protection", "none")
"""They start in a third of the time of six."""

OWN = ("--steps", str(STEPS), "--max-rows", "2000")
LINES = ("--set", "train.log_every_steps=7")


def train(folder: Path, data: Path, *words: str) -> Run:
    """The example, its model saved beside its run folder."""
    return run_example(SCRIPT.name, folder, (*LINES, *words), (str(data), *OWN))


@pytest.fixture(scope="module")
def killed(tmp_path_factory, criteo_rows) -> Run:
    """A server dies, and then the rank that prints and writes."""
    run = train(
        tmp_path_factory.mktemp("killed"), criteo_rows, "--kill", "1@9:parity", "--kill", "3@20"
    )
    assert run.code == 0, run.output
    return run


def test_killed_ranks_leave_the_model_of_an_undisturbed_run(killed, tmp_path, criteo_rows):
    calm = train(tmp_path, criteo_rows, *TWO_RANKS)
    assert calm.code == 0 and dead_ranks(calm) == [] and dead_ranks(killed) == [1, 3]
    assert killed.model == calm.model
    assert len(calm.progress) >= STEPS // 7 and killed.progress == calm.progress
    saved = [read_safetensors(run.folder.parent / "model.safetensors") for run in (calm, killed)]
    assert saved[0].keys() == saved[1].keys()
    assert all((saved[0][name] == saved[1][name]).all() for name in saved[0])


def test_the_saved_and_the_exported_model_are_loaded_by_torchrec(killed, tmp_path, criteo_rows):
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=16, feature_names=[name])
        for name, rows in CriteoDataset.open(str(criteo_rows), 2000).tables
    ]
    plain = DLRM(EmbeddingBagCollection(tables=tables), 13, [64, 16], [64, 1])
    saved = read_safetensors(killed.folder.parent / "model.safetensors")
    plain.load_state_dict({name: torch.from_numpy(array) for name, array in saved.items()})
    exported = tmp_path / "exported.safetensors"
    done = ecrm("export", str(killed.folder), "--output", str(exported), cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    again = read_safetensors(exported)
    assert again.keys() == saved.keys()
    assert all((again[name] == saved[name]).all() for name in saved)
    assert json.loads((killed.folder / "summary.json").read_text())["steps"] == STEPS


def test_plain_python_trains_alone_to_the_same_model(killed, tmp_path, criteo_rows):
    words = [sys.executable, str(SCRIPT), str(criteo_rows), *OWN]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert f"nothing is protected; protected is what is started by ecrm launch {SCRIPT}" in (
        done.stderr
    )
    alone, there = (
        read_safetensors(folder / "model.safetensors")
        for folder in (tmp_path, killed.folder.parent)
    )
    assert alone.keys() == there.keys() and len(alone) > 26
    assert all((alone[name] == there[name]).all() for name in alone)


def test_a_session_that_began_with_a_file_goes_on_and_is_exported(tmp_path):
    torch.manual_seed(5)
    began = loading.Model("cpu").state_dict()
    torch.save(began, tmp_path / "began.pt")
    copy(PROGRAMS / "loading.py", tmp_path / "train.py")
    words = ("launch", "train.py", "--servers", "2", "--trainers", "1", "--spares", "1")
    words += ("--protection", "chain", "--run-dir", "run", "--kill", "1@5:update")
    done = ecrm(*words, "--", "began.pt", "model.pt", cwd=tmp_path, timeout=100)
    assert done.returncode == 0 and "rank 1 died" in done.stdout, done.stdout + done.stderr
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert saved.keys() == began.keys()
    table = "ebc.embedding_bags.user.weight"
    stays = (saved[table] == began[table]).all(1)
    assert stays[loading.ROWS // 2 :].all() and not stays[: loading.ROWS // 2].all()
    words = ("export", "run", "--output", "exported.safetensors")
    done = ecrm(*words, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    exported = read_safetensors(tmp_path / "exported.safetensors")
    assert exported.keys() == saved.keys()  # all names of the table
    assert all((exported[name] == saved[name].numpy()).all() for name in saved)


CONFIG = """
[cluster]
servers = 2
trainers = 1
spares = 1

[protection]
name = "chain"
"""


@pytest.mark.drill
def test_the_line_of_a_dry_run_typed_by_hand_trains_as_its_config_says(tmp_path):
    torch.save(loading.Model("cpu").state_dict(), tmp_path / "began.pt")
    copy(PROGRAMS / "loading.py", tmp_path / "train.py")
    (tmp_path / "cluster.toml").write_text(CONFIG)
    words = ("launch", "train.py", "--config", "cluster.toml", "--check-determinism", "2")
    shown = ecrm(*words, "--dry-run", "--", "began.pt", "model.pt", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    line = shown.stdout.splitlines()[0]
    done = subprocess.run(
        line, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each slot of steps 0 to 1 was computed twice, to the same bits" in done.stdout
    assert "chain replication" in done.stdout and (tmp_path / "model.pt").exists()

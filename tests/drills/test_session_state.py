"""Sessions that begin with a file, under every protection: killed, and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copy

import pytest
import torch

from support.commands import ecrm
from support.paths import PROGRAMS
from support.programs import loading

LAYOUT = ("--servers", "4", "--trainers", "2", "--spares", "1")
PROTECTIONS = {
    "erasure": ("-k", "3", "-m", "1"),
    "parity": ("-k", "2", "-m", "2"),
    "chain": (),
    "replicate": (),
    "checkpoint": ("--set", "checkpoint.every_steps=4"),
    "mapped": (),
    "stateless": ("--set", "checkpoint.every_steps=4"),
    "none": (),
}


def train(folder: Path, *words: str, steps: str = "14"):
    copy(PROGRAMS / "loading.py", folder / "train.py")
    own = ("--", str(folder / "began.pt"), str(folder / "model.pt"), steps)
    return ecrm("launch", "train.py", *LAYOUT, *words, *own, cwd=folder, timeout=200)


def begin(folder: Path) -> None:
    torch.manual_seed(5)
    torch.save(loading.Model("cpu").state_dict(), folder / "began.pt")


def summary(folder: Path) -> dict:
    return json.loads((folder / "run" / "summary.json").read_text())


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("calm")
    begin(folder)
    done = train(folder, "--protection", "none", "--run-dir", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("name", PROTECTIONS)
def test_a_killed_server_changes_no_bit_of_a_session_that_began_with_a_file(name, tmp_path, calm):
    begin(tmp_path)
    protection = "erasure" if name == "parity" else name
    words = ("--protection", protection, *PROTECTIONS[name], "--run-dir", "run")
    kills = ("--kill", "1@9:update") if name != "none" else ()
    done = train(tmp_path, *words, *kills)
    assert done.returncode == 0, done.stdout + done.stderr
    dead = [rank for failure in summary(tmp_path)["failures"] for rank in failure["ranks"]]
    assert dead == ([1] if kills else [])
    mine, theirs = (
        torch.load(folder / "model.pt", weights_only=True) for folder in (tmp_path, calm)
    )
    same = all(torch.equal(mine[key], theirs[key]) for key in theirs)
    if name == "stateless":  # rows that no step has updated are there, whatever was lost
        began = torch.load(tmp_path / "began.pt", weights_only=True)
        table = "ebc.embedding_bags.user.weight"
        rest = slice(loading.ROWS // 2, None)
        assert torch.equal(mine[table][rest], began[table][rest])
        assert mine.keys() == theirs.keys()
    else:
        assert same and summary(tmp_path)["model_sha256"] == summary(calm)["model_sha256"]


def test_it_goes_on_with_the_same_file_and_is_refused_with_another(tmp_path, calm):
    begin(tmp_path)
    words = ("--run-dir", "run", "-k", "3", "-m", "1")
    done = train(tmp_path, *words, steps="9")
    assert done.returncode == 0, done.stdout + done.stderr
    other = torch.load(tmp_path / "began.pt", weights_only=True)
    kept = (tmp_path / "began.pt").read_bytes()
    torch.save({name: tensor + 1 for name, tensor in other.items()}, tmp_path / "began.pt")
    on = ("--run-dir", "on", "--resume", "run", "-k", "3", "-m", "1")
    refused = train(tmp_path, *on)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert refused.stderr.count("\n") == 1 and "begun as values" in refused.stderr
    (tmp_path / "began.pt").write_bytes(kept)
    done = train(tmp_path, *on)
    assert done.returncode == 0, done.stdout + done.stderr
    mine, theirs = (
        torch.load(folder / "model.pt", weights_only=True) for folder in (tmp_path, calm)
    )
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)

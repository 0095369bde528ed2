"""A dense part that is compiled, or runs in bfloat16: kills change no bit under mpirun."""

from __future__ import annotations

from pathlib import Path
from shutil import copy

import pytest

from support.commands import ecrm
from support.drilling import Run
from support.examples import dead_ranks
from support.paths import ROOT

LAYOUT = ("--servers", "3", "--trainers", "2", "--spares", "0", "-k", "2", "-m", "1")


def train(folder: Path, own: tuple[str, ...], *words: str) -> Run:
    folder.mkdir()
    copy(ROOT / "benchmarks" / "session_dense.py", folder / "train.py")
    line = ("launch", "train.py", *LAYOUT, "--run-dir", "run", *words)
    done = ecrm(*line, "--", "--steps", "12", *own, cwd=folder, timeout=400)
    return Run(done.returncode, done.stdout + done.stderr, folder / "run")


@pytest.mark.parametrize("own", [("--bf16",), ("--compile",), ("--compile", "--bf16")])
def test_kills_change_no_bit(own, tmp_path):
    calm = train(tmp_path / "calm", own)
    killed = train(tmp_path / "killed", own, "--kill", "3@4", "--kill", "1@8")
    assert calm.code == killed.code == 0, calm.output + killed.output
    assert (dead_ranks(calm), dead_ranks(killed)) == ([], [1, 3])
    assert killed.model == calm.model
    assert "dense part of a slot" in killed.output

"""A dense part that is compiled, or runs in bfloat16: kills change no bit under mpirun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.commands import ecrm
from support.drilling import Run
from support.examples import dead_ranks
from support.paths import ROOT

LAYOUT = ("--servers", "3", "--trainers", "2", "--spares", "0", "-k", "2", "-m", "1")
SETS = ("train.steps=12", "train.global_batch=128", "model.max_rows_per_table=1000")


def train(data: Path, folder: Path, own: tuple[str, ...], *words: str) -> Run:
    sets = [word for key in (*SETS, f"data.path={data}") for word in ("--set", key)]
    script = str(ROOT / "benchmarks" / "session_dlrm.py")
    line = ("launch", script, *LAYOUT, "--run-dir", str(folder), *words)
    done = ecrm(*line, "--", "quickstart", *sets, "--dot", *own, timeout=400)
    return Run(done.returncode, done.stdout + done.stderr, folder)


@pytest.mark.parametrize("own", [("--bf16",), ("--compile",), ("--compile", "--bf16")])
def test_kills_change_no_bit(criteo_rows, tmp_path, own):
    """A server dies, then a trainer, whose slot the other trainer adopts."""
    calm = train(criteo_rows, tmp_path / "calm", own)
    killed = train(criteo_rows, tmp_path / "killed", own, "--kill", "3@4", "--kill", "1@8")
    assert calm.code == killed.code == 0, calm.output + killed.output
    assert (dead_ranks(calm), dead_ranks(killed)) == ([], [1, 3])
    assert killed.model == calm.model
    compiled = [int(count) for count in re.findall(r"graphs compiled: (\d+)", killed.output)]
    assert any(compiled) == ("--compile" in own)

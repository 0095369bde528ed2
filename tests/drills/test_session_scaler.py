"""Losses that are not finite, under mpirun: a GradScaler skips their steps; else the run ends."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copy

import pytest

from ecrm.checkpoint.folder import find
from support.commands import ecrm
from support.drilling import Run
from support.examples import LAYOUT, dead_ranks
from support.paths import PROGRAMS

OVERFLOWS = ("--inf-in", "3", "--nan-in", "6", "--large-in", "9")
SERVER, TRAINER = "1@6:update", "4@9:dense"
"""Kills in steps that are skipped."""


def train(folder: Path, own: tuple[str, ...], *words: str) -> Run:
    copy(PROGRAMS / "overflowing.py", folder / "train.py")
    line = ("launch", "train.py", *LAYOUT, "--run-dir", "run", *words)
    done = ecrm(*line, "--", *own, cwd=folder, timeout=200)
    return Run(done.returncode, done.stdout + done.stderr, folder / "run")


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Run:
    run = train(tmp_path_factory.mktemp("calm"), ("--scaler", *OVERFLOWS))
    assert run.code == 0 and dead_ranks(run) == [], run.output
    return run


@pytest.mark.parametrize("kills", [(SERVER,), (TRAINER,), (SERVER, TRAINER)])
def test_kills_in_skipped_steps_change_no_bit(kills, tmp_path, calm):
    words = [word for kill in kills for word in ("--kill", kill)]
    run = train(tmp_path, ("--scaler", *OVERFLOWS), *words)
    assert run.code == 0, run.output
    assert dead_ranks(run) == sorted(int(kill.split("@")[0]) for kill in kills)
    assert run.model == calm.model
    assert run.summary["steps_skipped"] == calm.summary["steps_skipped"] == 3
    assert run.summary["steps"] == calm.summary["steps"] == 14


@pytest.mark.parametrize("kills", [(), ("--kill", "4@6:forward")], ids=["calm", "killed"])
def test_without_a_scaler_the_run_ends_with_one_line(kills, tmp_path):
    run = train(tmp_path, ("--nan-in", "6"), "--set", "checkpoint.every_steps=2", *kills)
    assert run.code == 6, run.output
    assert [event["ranks"] for event in run.events_of("failure")] == ([[4]] if kills else [])
    assert "Traceback" not in run.output
    (line,) = [line for line in run.output.splitlines() if "error" in line]
    assert line == (
        "ecrm: error: the loss of step 6 is not finite: in slot 1 it began in the gradients of "
        "rows of bags.embedding_bags.t or tables like it; lower the learning rates; the checkpoint "
        "of step 6, which is finite, is kept"
    )
    (newest,) = [checkpoint.step for checkpoint in find(run.folder / "checkpoints")[0][:1]]
    assert newest == 6 and not (run.folder / "summary.json").exists()
    failure = json.loads((run.folder / "failure.json").read_text())
    assert failure["exit_code"] == 6 and line.removeprefix("ecrm: error: ").startswith(
        failure["message"]
    )

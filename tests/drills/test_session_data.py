"""Batches made in worker processes under mpirun: kills leave the model that was made without."""

from __future__ import annotations

import re
from pathlib import Path
from shutil import copy

import pytest

from support.commands import ecrm
from support.drilling import Run
from support.examples import LAYOUT, dead_ranks
from support.paths import PROGRAMS

TRAINER = ("--kill", "3@17:update")


def train(folder: Path, kind: str, workers: int, *words: str) -> Run:
    folder.mkdir()
    copy(PROGRAMS / "fed_script.py", folder / "train.py")
    line = ("launch", "train.py", *LAYOUT, "--run-dir", "run", *words)
    done = ecrm(*line, "--", kind, str(workers), cwd=folder, timeout=200)
    return Run(done.returncode, done.stdout + done.stderr, folder / "run")


def waited(run: Run) -> float:
    """Milliseconds a step that the slowest rank has waited for batches, of the profile."""
    (slowest,) = re.findall(r"^input +[\d.]+ +([\d.]+) \(rank", run.output, re.MULTILINE)
    return float(slowest)


@pytest.mark.parametrize("kind", ["indexed", "streams"])
def test_a_killed_trainer_with_workers_leaves_the_model_of_a_calm_run_without(tmp_path, kind):
    calm = train(tmp_path / "calm", kind, 0)
    killed = train(tmp_path / "killed", kind, 2, *TRAINER)
    assert calm.code == 0, calm.output
    assert killed.code == 0, killed.output
    assert dead_ranks(calm) == [] and dead_ranks(killed) == [3]
    assert calm.summary["steps"] == killed.summary["steps"] == 40
    assert killed.model == calm.model


def test_trainers_alone_make_a_dataset_given_by_a_function(tmp_path):
    there = train(tmp_path / "there", "indexed", 0)
    made = train(tmp_path / "made", "made", 2, *TRAINER)
    assert made.code == 0, made.output
    assert dead_ranks(made) == [3] and made.model == there.model
    (failure,) = made.events_of("failure")
    trainers = {3, 4, *failure["slots"].values()}
    assert {path.name for path in (tmp_path / "made").glob("made-*")} == {
        f"made-{rank}" for rank in trainers
    }


def test_steps_do_not_wait_for_batches_that_workers_make(tmp_path):
    here = train(tmp_path / "here", "indexed", 0, "--profile")
    ahead = train(tmp_path / "ahead", "indexed", 6, "--profile")
    assert here.code == ahead.code == 0, here.output + ahead.output
    assert waited(here) > 18, "a batch takes 20 ms"
    assert waited(ahead) < waited(here) / 2

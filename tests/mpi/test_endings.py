"""Runs whose parity does not match at the end, and runs whose losses are not finite."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ecrm.checkpoint.folder import find
from support.drilling import RUN_SECONDS, Run
from support.paths import PROGRAMS

MISBEHAVING = str(PROGRAMS / "misbehaving.py")
RATE_WORDS = "lower train.sparse_lr or train.dense_lr"
SMALL = (
    "cluster.layout=colocated",
    "cluster.trainers=1",
    "cluster.spares=0",
    "model.dense_arch=native",
    "train.steps=40",
)


def run(
    folder: Path,
    data: Path,
    *sets: str,
    program: tuple[str, ...] = ("-m", "ecrm"),
    command: str = "launch",
) -> Run:
    """`ecrm launch tiny`, or `ecrm train tiny`, on few ranks."""
    words = [sys.executable, *program, command, "tiny", "--run-dir", str(folder)]
    for one in (f"data.path={data}", *SMALL, *sets):
        words += ["--set", one]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_SECONDS
    )
    return Run(done.returncode, done.stdout, folder)


def strict(path: Path) -> dict:
    """A JSON file without the words that JSON does not have."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{path}: {word}")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_wrong_parity_at_the_end_fails_the_run(tmp_path, criteo_rows):
    sets = ("cluster.servers=2", "protection.k=1")
    done = run(tmp_path / "run", criteo_rows, *sets, program=(MISBEHAVING, "flip a bit"))
    assert done.code == 5, done.output
    errors = [line for line in done.output.splitlines() if "error" in line]
    assert len(errors) == 1 and errors[0].startswith("ecrm: error: 1 of "), done.output
    assert (
        not (done.folder / "summary.json").exists() and not (done.folder / "checkpoints").exists()
    )
    rejected, failure = strict(done.folder / "rejected.json"), strict(done.folder / "failure.json")
    assert (
        rejected["completed"] is False
        and rejected["parity"]["mismatches"] == 1
        and rejected["model_sha256"]
    )
    assert failure["exit_code"] == 5 and errors[0] == f"ecrm: error: {failure['message']}"


RATES = ("train.sparse_lr=1e30", "train.dense_lr=1e30")


def test_a_loss_that_is_not_finite_ends_the_run_on_all_ranks_with_one_message(
    tmp_path, criteo_rows
):
    sets = ("cluster.servers=3", "protection.k=2", "checkpoint.every_steps=1", "checkpoint.keep=1")
    done = run(tmp_path / "run", criteo_rows, *sets, *RATES)
    assert done.code == 6, done.output
    (error,) = [line for line in done.output.splitlines() if "error" in line]
    found = re.fullmatch(
        r"ecrm: error: (the loss of step (\d+) is not finite: in slot 0 it began in "
        r"(?:\d+ rows|row|parameter|the gradients) .*)",
        error,
    )
    assert found and RATE_WORDS in error, done.output
    kept = [checkpoint.step for checkpoint in find(done.folder / "checkpoints")[0]]
    assert len(kept) == 1 and f"the checkpoint of step {kept[0]}, which is finite, is kept" in error
    assert 1 <= kept[0] <= int(found[2])
    failure = strict(done.folder / "failure.json")
    assert (failure["message"], failure["exit_code"]) == (found[1], 6)
    assert not (done.folder / "summary.json").exists()


@pytest.mark.drill
def test_with_warn_a_loss_that_is_not_finite_is_told_and_written_as_null(tmp_path, criteo_rows):
    rates = (*RATES, "train.log_every_steps=0", "train.on_nonfinite=warn")
    alone = ("cluster.servers=1", "protection.name=none")  # one rank needs no mpirun
    done = run(tmp_path / "run", criteo_rows, *alone, *rates, command="train")
    # no checkpoint holds what is not finite, so the model is not kept
    assert done.code == 7, done.output
    said = [line for line in done.output.splitlines() if "is not finite: in slot" in line]
    assert len(said) == 1 and said[0].startswith("! the loss of step ")
    assert all(RATE_WORDS in line for line in said)
    summary = strict(done.folder / "summary.json")
    assert [summary[name] for name in ("eval_logloss", "eval_auc")] == [None] * 2
    assert summary["completed"] is True
    events = [
        json.loads(line, parse_constant=str)
        for line in (done.folder / "events.jsonl").read_text().splitlines()
    ]
    assert [event["logged"]["loss"] for event in events if event["event"] == "progress"] == [None]
    assert [event["slot"] for event in events if event["event"] == "not_finite"] == [0]

"""Runs that end in a way of their own: parity that does not match at the end, losses that are not finite."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from drilling import RUN_SECONDS, Run

MISBEHAVING = str(Path(__file__).with_name("programs") / "misbehaving.py")
SMALL = ("cluster.layout=colocated", "cluster.trainers=1", "cluster.spares=0", "model.dense_arch=native", "train.steps=40")


def run(folder: Path, data: Path, *sets: str, program: tuple[str, ...] = ("-m", "ecrm"), command: str = "launch") -> Run:
    """`ecrm launch tiny`, or `ecrm train tiny`, on few ranks."""
    words = [sys.executable, *program, command, "tiny", "--run-dir", str(folder)]
    for one in (f"data.path={data}", *SMALL, *sets):
        words += ["--set", one]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_SECONDS)
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
    assert not (done.folder / "summary.json").exists()
    rejected, failure = strict(done.folder / "rejected.json"), strict(done.folder / "failure.json")
    assert rejected["completed"] is False and rejected["parity"]["mismatches"] == 1 and rejected["model_sha256"]
    assert failure["exit_code"] == 5 and errors[0] == f"ecrm: error: {failure['message']}"


def test_a_loss_that_is_not_finite_is_told_once_and_written_as_null(tmp_path, criteo_rows):
    rates = ("train.sparse_lr=1e30", "train.dense_lr=1e30", "train.log_every_steps=0")
    alone = ("cluster.servers=1", "protection.name=none")  # one rank needs no mpirun
    done = run(tmp_path / "run", criteo_rows, *alone, *rates, command="train")
    assert done.code == 0, done.output
    (warning,) = [line for line in done.output.splitlines() if "arning" in line]
    assert warning.startswith("ecrm: warning: the loss of step ") and "train.sparse_lr or train.dense_lr" in warning
    summary = strict(done.folder / "summary.json")
    assert [summary[name] for name in ("train_logloss", "eval_logloss", "eval_auc", "eval_auc_error")] == [None] * 4
    assert summary["completed"] is True
    events = [json.loads(line, parse_constant=str) for line in (done.folder / "events.jsonl").read_text().splitlines()]
    assert [event["loss"] for event in events if event["event"] == "progress"] == [None]

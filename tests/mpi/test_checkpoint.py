"""Checkpoints of real runs: what goes on from one, and what is refused before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ecrm.checkpoint.folder import name_of
from ecrm.cli.commands import main
from support.drilling import (
    BASE,
    launch_words,
    resume,
)


def test_the_next_day_at_another_rate_ends_the_same_with_and_without_kills(
    tmp_path, criteo_rows, next_day, killed_run
):
    """More ranks die than protection covers, before and after the first checkpoint of the run."""
    sets = {
        **BASE,
        "train.sparse_lr": 0.02,
        "train.dense_lr": 0.02,
        "train.steps": 30,
        "checkpoint.every_steps": 12,
    }
    calm = resume(tmp_path / "calm", next_day, killed_run, sets)
    assert calm.code == 0, calm.output
    assert calm.summary["resumed"]["data_began"] == 12
    for line in (
        "train.sparse_lr 0.05 -> 0.02",
        "train.dense_lr 0.01 -> 0.02",
        "12,000 -> 6,000 rows, from the first of them",
    ):
        assert calm.output.count(line) == 1, calm.output
    kills = ("0@15:parity", "1@15:parity", "2@27:parity", "3@27:parity")
    run = resume(
        tmp_path / "disturbed",
        next_day,
        killed_run,
        {**sets, "cluster.spares": 3, "cluster.servers": 4},
        kills,
    )
    assert run.code == 0, run.output
    assert [event["step"] for event in run.events_of("rolled_back")] == [12, 24], run.output
    assert run.model == calm.model


def _said(capsys, tmp_path: Path, data: Path, given: Path, *sets: str) -> tuple[int, str]:
    """Exit code and the one line of an `ecrm launch --resume` that starts nothing."""
    words = launch_words(tmp_path / "never", data, BASE)[3:]
    for text in sets:
        words += ["--set", text]
    code = main([*words, "--resume", str(given)])
    line = capsys.readouterr().err
    assert not (tmp_path / "never").exists() and line.count("\n") == 1, line
    return code, line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.seed=8", "set train.seed=7"),
        ("model.dense_arch=torchrec", "set model.dense_arch=native"),
        ("train.sparse_optimizer=sgd", "set train.sparse_optimizer=rowwise_adagrad"),
        ("train.global_batch=128", "set train.global_batch=64"),
        ("train.slots=4", "set train.slots=2"),
        ("model.max_rows_per_table=999", "has other tables: t_cat_"),
        ("train.steps=11", "set train.steps=12, or more"),
        ("data.eval_fraction=0.2", "set data.eval_fraction=0.1"),
    ],
)
def test_a_checkpoint_of_another_job_is_refused_before_anything_starts(
    capsys, tmp_path, criteo_rows, killed_run, change, words
):
    code, line = _said(capsys, tmp_path, criteo_rows, killed_run, change)
    assert code == 2 and words in line, line


def test_a_checkpoint_that_is_not_there_or_not_whole_is_refused_by_name(
    capsys, tmp_path, criteo_rows, killed_run
):
    assert _said(capsys, tmp_path, criteo_rows, tmp_path / "nowhere")[0] == 2
    last = tmp_path / "damaged" / "checkpoints" / name_of(12)
    shutil.copytree(killed_run / "checkpoints" / name_of(12), last)
    dense = last / "dense.bin"
    dense.write_bytes(dense.read_bytes()[:-1])
    code, line = _said(capsys, tmp_path, criteo_rows, tmp_path / "damaged")
    assert code == 4 and str(dense) in line
    (last / "manifest.json").unlink()
    code, line = _said(capsys, tmp_path, criteo_rows, last)
    assert code == 4 and "incomplete" in line

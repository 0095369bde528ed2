"""Checkpoints of real runs: a rollback, and what is refused before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ecrm.checkpoint.folder import name_of
from ecrm.cli.commands import main
from support.drilling import BASE, CHECKPOINTS, launch, launch_words


@pytest.mark.parametrize(
    "sets",
    [
        pytest.param(
            {"protection.name": "checkpoint", "protection.verify_parity_at_end": False},
            id="checkpoint",
            marks=pytest.mark.drill,
        ),
        pytest.param({}, id="erasure"),
    ],
)
def test_more_than_the_protection_covers_rolls_back_to_the_checkpoint(
    tmp_path, criteo_rows, undisturbed, sets
):
    run = launch(
        tmp_path / "run",
        criteo_rows,
        {**CHECKPOINTS, **sets},
        kills=("0@10:parity", "1@10:parity", "2@10:parity"),
    )
    assert run.code == 0, run.output
    assert "rolled back to step 9" in run.output and run.events_of("rolled_back")[0]["step"] == 9
    assert run.model == undisturbed, run.output


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
        ("train.steps=39", "set train.steps=40, or more"),
        ("data.eval_fraction=0.2", "set data.eval_fraction=0.1"),
    ],
)
def test_a_checkpoint_of_another_job_is_refused_before_anything_starts(
    capsys, tmp_path, criteo_rows, undisturbed_run, change, words
):
    code, line = _said(capsys, tmp_path, criteo_rows, undisturbed_run.folder, change)
    assert code == 2 and words in line, line


def test_a_checkpoint_that_is_not_there_or_not_whole_is_refused_by_name(
    capsys, tmp_path, criteo_rows, undisturbed_run
):
    assert _said(capsys, tmp_path, criteo_rows, tmp_path / "nowhere")[0] == 2
    last = tmp_path / "damaged" / "checkpoints" / name_of(40)
    shutil.copytree(undisturbed_run.folder / "checkpoints" / name_of(40), last)
    dense = last / "dense.bin"
    dense.write_bytes(dense.read_bytes()[:-1])
    code, line = _said(capsys, tmp_path, criteo_rows, tmp_path / "damaged")
    assert code == 4 and str(dense) in line
    (last / "manifest.json").unlink()
    code, line = _said(capsys, tmp_path, criteo_rows, last)
    assert code == 4 and "incomplete" in line

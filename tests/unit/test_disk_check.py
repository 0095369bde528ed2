"""A disk too small for one checkpoint, told before the first step."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ecrm.base.errors import UsageError
from ecrm.checkpoint.folder import CheckpointFolder
from ecrm.config import make_config
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.tables import Table, row_spaces
from ecrm.run.disk_check import free_on_disk, judge_disk, most_at_once
from support.commands import forked

SPACES = row_spaces([Table("one", 500, 8, SparseOptimizer("rowwise_adagrad", 0.1))])
DENSE = SimpleNamespace(entries=[("weight", torch.zeros(1000)), ("step", 3)])
ROWS, CERTAIN = 500 * (8 + 4 * 9), 4000
"""Bytes of row numbers, rows and their state; and of dense parameters."""


def judge(*free: int | None, at_once: int = 1) -> str:
    return judge_disk(Path("runs/x"), DENSE, SPACES, free, at_once)


def test_a_checkpoint_of_all_rows_that_does_not_fit_is_warned_of():
    assert judge(ROWS + CERTAIN) == "" == judge(None, None)
    said = judge(10**9, ROWS + CERTAIN - 1)
    assert said.startswith("once every row is trained a checkpoint needs 0.0 MB, and 0.0 MB are")
    assert "free in runs/x" in said and said.endswith("in --run-dir")
    assert judge(CERTAIN) == said


def test_a_disk_with_room_for_one_checkpoint_and_not_for_all_is_warned_of():
    one = ROWS + CERTAIN
    assert judge(3 * one, at_once=3) == ""
    said = judge(3 * one - 1, at_once=3)
    assert said.startswith(
        "once every row is trained 3 checkpoints at once need 0.1 MB, and 0.1 MB"
    )
    assert said.endswith("in --run-dir, or set a lower checkpoint.keep")
    assert judge(one - 1, at_once=3).startswith("once every row is trained a checkpoint needs")


@pytest.mark.parametrize(
    ("checkpoint", "count"),
    [
        ({}, 1),
        ({"every_steps": 10}, 3),
        ({"every_steps": 10, "keep": 5}, 6),
        ({"every_steps": 60}, 2),
        ({"every_steps": 500}, 1),
        ({"every_minutes": 1.0}, 3),
        ({"every_steps": 10, "keep_best": "auc"}, 4),
    ],
)
def test_keep_and_one_more_are_on_the_disk_at_once(checkpoint, count):
    train = {"eval_every_steps": 5}
    config = make_config(
        {"data": {"path": "absent"}, "checkpoint": checkpoint, "train": train}, "test"
    )
    assert most_at_once(config, 100) == count
    assert most_at_once(config, 100, keeps_best=True) == count + ("keep_best" not in checkpoint)


def test_dense_parameters_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="the model could not be kept: make room there") as caught:
        judge(CERTAIN - 1)
    assert str(caught.value).count("\n") == 0


def test_a_run_without_checkpoints_needs_no_room(tmp_path, monkeypatch):
    seen = []
    usage = SimpleNamespace(free=7)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: seen.append(path) or usage)
    assert free_on_disk(None) is None and not seen
    assert free_on_disk(CheckpointFolder(tmp_path / "run" / "checkpoints")) == 7
    assert seen == [tmp_path], "the folder that is there"
    earlier = tmp_path / "run" / "checkpoints" / "step-00000001"
    earlier.mkdir(parents=True)
    (earlier / "rows").write_bytes(bytes(100_000))
    assert free_on_disk(CheckpointFolder(tmp_path / "run" / "checkpoints")) >= 100_007


PROGRAM = """
import shutil, sys, types
usage = types.SimpleNamespace(free=int(sys.argv[1]))
shutil.disk_usage = lambda path: usage
import ecrm.cli.commands
sys.exit(ecrm.cli.commands.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("free", "code"), [("1000", 2), pytest.param("100000", 0, marks=pytest.mark.drill)]
)
def test_a_run_on_a_full_disk_is_told_at_its_start(tmp_path, criteo_rows, free, code):
    sets = (
        f"data.path={criteo_rows}",
        "cluster.layout=colocated",
        "cluster.servers=1",
        "cluster.trainers=1",
        "cluster.spares=0",
        "protection.name=none",
        "train.steps=2",
    )
    words = ["train", "tiny", "--run-dir", str(tmp_path / "run")]
    words += [word for one in sets for word in ("--set", one)]
    done = forked(["-c", PROGRAM, free, *words], timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    if code:
        assert "the model could not be kept" in done.stderr and "Traceback" not in done.stderr
        assert "step 2/2" not in done.stdout
    else:
        assert "warning: once every row is trained a checkpoint needs" in done.stdout

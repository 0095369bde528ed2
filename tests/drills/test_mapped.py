"""Mapped files under real mpirun: kills of some and of all ranks, at random instants."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from ecrm.cli.commands import main
from support.drilling import BASE, drill, kill_everything_once, launch, resume

MAPPED = {**BASE, "protection.name": "mapped"}
LONG = {"train.steps": 2000, "train.global_batch": 64}


def trains(folder: Path):
    """Whether training has begun."""
    events = folder / "events.jsonl"
    return lambda: events.exists() and '"progress"' in events.read_text()


def test_more_than_half_of_the_servers_die_at_once(tmp_path, criteo_rows, undisturbed):
    run = drill(tmp_path / "run", criteo_rows, MAPPED, ("0@9:update", "1@9:update", "3@20:commit"))
    assert run.model == undisturbed
    assert all(
        failure["redone_steps"] <= 1 for failure in run.summary["failures"]
    ) and run.events_of("rolled_back")


@pytest.mark.parametrize("flush", ["none", "commit"])
def test_everything_is_killed_again_and_again(tmp_path, criteo_rows, flush):
    sets = {**MAPPED, **LONG, "mapped.path": str(tmp_path / "files"), "mapped.flush": flush}
    expected = launch(tmp_path / "undisturbed", criteo_rows, {**BASE, **LONG})
    draw = random.Random()
    wait = draw.uniform(0, 0.5)
    print(f"killed {wait} s after training began")
    kill_everything_once(trains(tmp_path / "killed"), wait, tmp_path / "killed", criteo_rows, sets)
    # whose folder leads to the files, as those of the runs that go on do
    last = tmp_path / "killed"
    for number in range(2):
        wait = draw.uniform(0, 0.5)
        print(f"killed again after {wait} s")
        kill_everything_once(
            trains(tmp_path / f"again{number}"),
            wait,
            tmp_path / f"again{number}",
            criteo_rows,
            sets,
            last,
        )
        last = tmp_path / f"again{number}"
    run = resume(tmp_path / "run", criteo_rows, last, sets)
    assert run.code == 0, run.output
    assert run.model == expected.model, run.output
    assert run.summary["resumed"]["step"] > 0


def test_a_checkpoint_outlives_the_files(tmp_path, criteo_rows, undisturbed):
    """Checkpoints of mapped files: a death goes back to the last commit, as without checkpoints.

    Without the files, another protection continues the run.
    """
    sets = {**MAPPED, "mapped.path": str(tmp_path / "files"), "checkpoint.every_steps": 15}
    run = drill(tmp_path / "run", criteo_rows, sets, ("1@20:update",))
    assert run.model == undisturbed
    assert [event["step"] for event in run.events_of("checkpoint")] == [15, 30, 40]
    assert all(
        failure["redone_steps"] <= 1 for failure in run.summary["failures"]
    ) and run.events_of("rolled_back")
    # whose own folder has no checkpoint yet
    again = resume(tmp_path / "again", criteo_rows, tmp_path / "run", sets)
    assert again.code == 0 and [event["step"] for event in again.events_of("checkpoint")] == [40], (
        again.output
    )
    shutil.rmtree(tmp_path / "files")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000040")
    refused = resume(tmp_path / "refused", criteo_rows, tmp_path / "run", sets)
    assert refused.code == 2 and "set protection.name=erasure" in refused.output
    run = resume(tmp_path / "other", criteo_rows, tmp_path / "run", BASE)
    assert run.code == 0 and run.summary["resumed"]["step"] == 30 and run.model == undisturbed, (
        run.output
    )


def test_a_drill_gives_each_run_files_of_its_own(tmp_path, criteo_rows, capfd):
    words = ["drill", "tiny", "--run-dir", str(tmp_path / "drill"), "--kill", "1@9:update"]
    for key, value in {
        **MAPPED,
        "data.path": criteo_rows,
        "mapped.path": tmp_path / "files",
    }.items():
        words += ["--set", f"{key}={value}"]
    assert main(words) == 0, capfd.readouterr()
    assert {path.name for path in (tmp_path / "files").iterdir()} == {"undisturbed", "disturbed"}
    assert main([*words[:3], str(tmp_path / "other"), *words[4:]]) == 2
    assert "holds the files of a run" in capfd.readouterr().err
    assert not (tmp_path / "other").exists()

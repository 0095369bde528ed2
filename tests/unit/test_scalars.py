"""TensorBoard scalars: those of events.jsonl, each step once, also after steps were undone.

Without the package they are refused.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from ecrm.cli.commands import main
from ecrm.launch import scalars as module
from ecrm.launch.scalars import FOLDER, Scalars
from ecrm.launch.watch import Watch
from support.scalars import progress, read


def follow(run_dir: Path, *events: dict) -> None:
    """One launch during which these events come, some at a time."""
    watch = Watch(run_dir, lambda folder: [Scalars(folder)])
    watch.began(SimpleNamespace(stdout=None, stderr=None))
    for number, event in enumerate(events):
        with open(run_dir / "events.jsonl", "a") as file:
            file.write(json.dumps({"time": 100.0 + number, **event}) + "\n")
        watch.look()
    watch.ended()


def test_steps_undone_by_a_rollback_are_there_once(tmp_path):
    rolled_back = {"event": "rolled_back", "step": 10}
    steps = [progress(10, 0.5), progress(20, 0.4), progress(30, 0.9)]
    evaluation = {"event": "evaluation", "step": 20, "values": {"auc": 0.75}}
    lasts = {"event": "evaluation", "step": 10, "values": {"auc": 0.5, "logloss": None}}
    again = [progress(20, 0.375), progress(30, None)]
    follow(tmp_path, {"event": "start"}, *steps, lasts, evaluation, rolled_back, *again)
    assert read(tmp_path)["train/loss"] == [(10, 0.5), (20, 0.375)]
    assert [step for step, _ in read(tmp_path)["cluster/rebuilt"]] == [10, 20, 30]
    assert read(tmp_path)["evaluation/auc"] == [(10, 0.5)]
    assert "evaluation/logloss" not in read(tmp_path)


def test_a_launch_that_goes_on_in_a_folder_writes_all_anew(tmp_path):
    follow(tmp_path, {"event": "start"}, progress(10, 0.5), progress(20, 0.25))
    resumed = {"event": "start", "resumed": {"step": 10}}
    follow(tmp_path, resumed, progress(20, 0.25), progress(30, 0.125))
    assert read(tmp_path)["train/loss"] == [(10, 0.5), (20, 0.25), (30, 0.125)]
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_a_folder_that_cannot_be_written_costs_the_scalars_and_a_line(tmp_path, capsys):
    (tmp_path / FOLDER).write_text("in the way")
    follow(tmp_path, {"event": "start"}, progress(10, 0.5), progress(20, 0.25))
    said = capsys.readouterr().err
    assert said.startswith(f"ecrm: warning: no scalars in {tmp_path / FOLDER} from here on: ")
    assert said.count("\n") == 1


def test_a_broken_package_costs_the_scalars_and_a_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    follow(tmp_path, {"event": "start"}, progress(10, 0.5), progress(20, 0.25))
    assert capsys.readouterr().err.count("no scalars in") == 1


def test_without_the_package_a_run_is_refused(criteo_rows, tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    there = lambda name, *rest: None if name == "tensorboard" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(module.importlib.util, "find_spec", there)
    words = ["launch", "tiny", "--set", f"data.path={criteo_rows}"]
    words += ["--run-dir", str(tmp_path / "run")]
    assert main([*words, "--set", "train.tensorboard=true"]) == 2
    said = capsys.readouterr().err
    assert "set train.tensorboard=false, or type pip install 'ecrm[tensorboard]'" in said
    assert not (tmp_path / "run").exists()
    assert main([*words, "--dry-run"]) == 0

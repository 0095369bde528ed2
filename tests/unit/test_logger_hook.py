"""The command of `hooks.logger`: every value once for its step, bounded in time, with a log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from ecrm.launch.failure_hook import LOG
from ecrm.launch.logger_hook import LoggerHook
from support.scalars import progress

KEEP = "cat > lines.jsonl"
EVALUATION = {"event": "evaluation", "step": 20, "values": {"auc": 0.75, "logloss": None}}


def follow(folder: Path, command: str, *events: dict, seconds: float = 10.0) -> None:
    """One launch during which these events come, one at a time."""
    hook = LoggerHook(f"cd {folder} && {command}", seconds, folder)
    for number, event in enumerate(events):
        with open(folder / "events.jsonl", "a") as file:
            file.write(json.dumps({"time": 100.0 + number, **event}) + "\n")
        hook.take([event])
    hook.close()


def told(folder: Path, tag: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]
    return [(line["step"], line["values"][tag]) for line in lines if tag in line["values"]]


def test_steps_done_again_are_told_once(tmp_path, capsys):
    rolled_back = {"event": "rolled_back", "step": 10}
    steps = [progress(10, 0.5), progress(20, 0.25), EVALUATION]
    again = [progress(20, 0.25), EVALUATION, progress(30, None)]
    follow(tmp_path, KEEP, {"event": "start"}, *steps, rolled_back, *again)
    assert told(tmp_path, "train/loss") == [(10, 0.5), (20, 0.25)]
    assert told(tmp_path, "cluster/rebuilt") == [(10, 1.0), (20, 1.0), (30, 1.0)]
    assert told(tmp_path, "evaluation/auc") == [(20, 0.75)]
    assert told(tmp_path, "evaluation/logloss") == [] and capsys.readouterr().err == ""
    assert "exit code 0" in (tmp_path / LOG).read_text()


def test_a_resumed_run_tells_all_steps_of_its_folder(tmp_path):
    follow(tmp_path, KEEP, {"event": "start"}, progress(10, 0.5), progress(20, 0.25))
    resumed = {"event": "start", "resumed": {"step": 10}}
    follow(tmp_path, KEEP, resumed, progress(20, 0.25), progress(30, 0.125))
    assert told(tmp_path, "train/loss") == [(10, 0.5), (20, 0.25), (30, 0.125)]


def test_a_run_without_events_starts_no_command(tmp_path):
    follow(tmp_path, KEEP)
    assert not (tmp_path / "lines.jsonl").exists()


def test_a_command_that_ends_before_the_run_costs_a_line(tmp_path, capsys):
    hook = LoggerHook("exec 0<&-; echo why >&2; exit 3", 10.0, tmp_path)
    (tmp_path / "events.jsonl").write_text(json.dumps({"time": 1.0, **progress(10, 0.5)}) + "\n")
    hook.take([{}])
    hook.close()
    said = capsys.readouterr().err
    assert said.startswith("ecrm: warning: hooks.logger ended with 3") and said.count("\n") == 1
    assert (
        f"; see {tmp_path / LOG}; all values once more" in said
        and "why" in (tmp_path / LOG).read_text()
    )


def test_the_advice_gives_a_mended_command_all_values(tmp_path, capsys):
    follow(tmp_path, "./mine.sh", {"event": "start"}, progress(10, 0.5), progress(20, 0.25))
    said = capsys.readouterr().err
    assert "hooks.logger ended with 127" in said
    start = {"event": "start", "config": {"train": {"steps": 20}}, "failures_left": 1, "time": 1.0}
    events = (tmp_path / "events.jsonl").read_text()
    (tmp_path / "events.jsonl").write_text(f"{json.dumps(start)}\n{events.partition(chr(10))[2]}")
    (tmp_path / "mine.sh").write_text(f"#!/bin/sh\n{KEEP}; echo $ECRM_RUN_DIR > folder\n")
    (tmp_path / "mine.sh").chmod(0o755)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    typed = said.partition("after the run: ")[2]
    subprocess.run(["bash", "-c", typed], env={**os.environ, "PATH": path}, check=True, timeout=60)
    assert told(tmp_path, "train/loss") == [(10, 0.5), (20, 0.25)]
    assert (tmp_path / "folder").read_text() == f"{tmp_path}\n"


def test_a_command_that_does_not_end_is_killed(tmp_path, capsys):
    began = time.monotonic()
    follow(tmp_path, "sleep 60 & wait", {"event": "start"}, progress(10, 0.5), seconds=0.2)
    assert time.monotonic() - began < 10
    said = capsys.readouterr().err
    assert "took more than 0.2 s after the last step: killed" in said


def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path, capsys):
    hook = LoggerHook("true", 1.0, tmp_path / "absent")
    hook.take([{}])
    hook.close()
    assert "hooks.logger cannot run: No such file" in capsys.readouterr().err

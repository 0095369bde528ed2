"""The progress bar on a terminal: its text and width, and that the run does not depend on it."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from ecrm.launch.run_status import RunStatus
from ecrm.launch.screen import PROGRESS_LINE, Screen, screen_of

START = {"event": "start", "time": 100.0}

FAILURE = {
    "event": "failure",
    "time": 103.5,
    "shards": {"1": 6},
    "moved": {"2": 3},
    "failures_left": 0,
}


def progress(step: int, at: float, **more) -> dict:
    fields = {
        "samples_per_second": 20_000.0,
        "logged": {"loss": 0.5},
        "failures_left": 1,
        "rebuilt": 1.0,
    }
    return {"event": "progress", "time": at, "step": step, **fields, **more}


def test_a_standing_is_what_the_events_say():
    standing = RunStatus(100)
    standing.take([START])
    assert standing.started and standing.seconds_left(100.0) is None
    standing.take([progress(10, 101.0), progress(30, 103.0)])
    assert (standing.step, standing.logged, standing.failures_left) == (30, {"loss": 0.5}, 1)
    assert standing.seconds_left(103.0) == 7.0 and standing.seconds_left(105.0) == 5.0
    standing.take([FAILURE])
    assert (standing.rebuilding, standing.rebuilt, standing.failures_left) == ({1, 2}, 0.0, 0)
    standing.take([progress(40, 104.0, rebuilt=0.5, failures_left=0)])
    assert (standing.rebuilding, standing.rebuilt) == ({1, 2}, 0.5)
    standing.take([{"event": "rebuilt", "time": 104.5, "shards": [1], "failures_left": 1}])
    assert standing.rebuilding == {2} and not standing.finishing
    early = RunStatus(100, started=True, step=40)
    early.take([{"event": "ended_early", "time": 104.5, "step": 40, "steps_wanted": 100}])
    assert early.finishing
    standing.take([progress(100, 110.0)])
    assert standing.finishing and standing.seconds_left(111.0) == 0.0


def test_a_standing_goes_back_with_the_run():
    standing = RunStatus(100)
    standing.take([{**START, "resumed": {"step": 20}}])
    assert standing.step == 20
    rolled_back = {"event": "rolled_back", "time": 104.0, "step": 20}
    standing.take([progress(30, 101.0), FAILURE, rolled_back])
    assert (standing.step, standing.rebuilding) == (20, set())
    standing.take([progress(30, 106.0)])
    assert standing.seconds_left(106.0) == 14.0  # at the pace since the rollback
    standing.take([progress(30, 106.0)])
    assert standing.seconds_left(106.0) == 14.0


def picture(standing: RunStatus, width: int, stopping: bool = False, **more) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, _environ={}, **more)
    console.print(Screen(console, standing, 7)._picture(106.0, 65.0, stopping))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 40])
def test_a_picture_fits_the_terminal(width):
    standing = RunStatus(12_000)
    assert picture(standing, width, no_color=True) == ["starting 7 ranks  1m05s"]
    standing.take([START, progress(50, 102.0), progress(4_000, 106.0), FAILURE])
    standing.take([progress(4_050, 106.1, rebuilt=0.43)])
    lines = picture(standing, width, stopping=True, no_color=True)
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith("step  4,050/12,000 ━")
    assert lines[0].rstrip().endswith("34%  12s left")
    assert lines[1].startswith("loss 0.5000  20,000 ")
    assert ("can survive 1 more at once" in lines[1]) == (width == 80)
    assert lines[2] == "rebuilding shards 1, 2: 43%"
    assert lines[3].startswith("stopping after this step")
    standing.take([progress(12_000, 120.0, logged={"loss": None})])
    lines = picture(standing, width, no_color=True)
    assert "100%" in lines[0] and "left" not in lines[0] and lines[1].startswith("loss -  20,000 ")
    assert lines[-1] == "all steps done: evaluation and checks"


def test_a_script_tells_its_steps_as_it_starts_and_then_what_it_has_logged():
    standing = RunStatus(0)
    assert picture(standing, 80, no_color=True) == ["starting 7 ranks  1m05s"]
    standing.take([{**START, "script": "train.py", "config": {"train": {"steps": 120}}}])
    lines = picture(standing, 80, no_color=True)
    assert lines[0].startswith("step   0/120 ") and lines[1] == "- steps/s"
    told = {"steps_per_second": 31.64, "logged": {"loss": 0.5, "noise": 0.25}}
    standing.take(
        [
            {"event": "progress", "time": at, "step": step, "rebuilt": 1.0, **told}
            for step, at in ((30, 103.0), (60, 106.0))
        ]
    )
    lines = picture(standing, 80, no_color=True)
    assert lines[0].rstrip().endswith("50%  6s left")
    assert lines[1] == "loss 0.5000  noise 0.2500  31.6 steps/s"


def test_where_the_end_is_not_known_nothing_is_reckoned_from_it():
    standing = RunStatus(0)
    config = {"train": {"steps": 10_000}}
    standing.take([{**START, "script": "train.py", "config": config, "open_end": True}])
    standing.take(
        [
            {"event": "progress", "time": at, "step": step, "rebuilt": 1.0}
            for step, at in ((30, 103.0), (60, 106.0))
        ]
    )
    line = picture(standing, 80, no_color=True)[0].rstrip()
    assert line == "step     60 of at most 10,000"
    assert PROGRESS_LINE.match("step    60 of at most 10000      42.9 steps/s")


def test_no_color_is_heeded():
    standing = RunStatus(100)
    standing.take([START, progress(50, 102.0)])
    for off in (False, True):
        lines = picture(standing, 80, no_color=off, color_system="standard")
        assert ("\x1b[3" in "".join(lines)) != off


def test_only_a_terminal_that_can_redraw_has_a_screen(monkeypatch):
    reading, writing = os.openpty()
    with open(writing, "w") as terminal:
        for name, wanted in (("xterm-256color", True), ("dumb", False)):
            monkeypatch.setenv("TERM", name)
            assert (screen_of(terminal, RunStatus(1), 1) is not None) == wanted
    os.close(reading)
    assert screen_of(io.StringIO(), RunStatus(1), 1) is None


def test_without_a_terminal_nothing_of_it_is_loaded():
    code = "import sys, ecrm.launch.launcher; sys.exit('rich' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

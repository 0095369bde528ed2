"""The progress bar on a terminal: its text and width, and that the run does not depend on it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from ecrm.cli.commands import main
from ecrm.launch import launcher
from ecrm.launch.run_state import RankState
from ecrm.launch.screen import BESIDE_TABLE, PROGRESS_LINE, Screen, screen_of
from ecrm.run.run_status import RunStatus

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
    assert (standing.rebuilding, standing.rebuilt) == ({2}, 0.5)
    assert not standing.finishing
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


FOLDER = Path("none")


def picture(standing: RunStatus, width: int, stopping: bool = False, found=(), **more) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, _environ={}, **more)
    screen = Screen(console, standing, 7, FOLDER)
    screen._found = found
    console.print(screen._picture(106.0, screen._began + 65.0, stopping))
    return console.file.getvalue().splitlines()


def ranks(count: int, dead: int) -> list[RankState]:
    """Ranks of this many hosts; a rank is dead."""
    return [
        RankState(rank, "-", f"node{rank}", 100 + rank, "dead", None)
        if rank == dead
        else RankState(rank, "server", f"node{rank}", 100 + rank, "alive", 165_000_000)
        for rank in range(count)
    ]


@pytest.mark.parametrize(
    ("width", "header", "row"),
    [
        (
            80,
            "rank  role    host   pid  state  memory",
            "   0  server  node0  100  alive  165 MB",
        ),
        (40, "rank  role    state  memory", "   0  server  alive  165 MB"),
    ],
)
def test_ranks_have_role_state_and_memory(width, header, row):
    standing = RunStatus(100)
    standing.take([START])
    lines = picture(standing, width, found=ranks(3, dead=1), no_color=True, height=40)
    assert (lines[-4], lines[-3]) == (header, row) and "dead" in lines[-2]


def test_of_many_ranks_those_that_died_are_shown_and_the_terminal_is_not_overrun():
    standing = RunStatus(100)
    standing.take([START, FAILURE])
    lines = picture(standing, 80, True, ranks(46, dead=40), no_color=True, height=BESIDE_TABLE + 5)
    assert len(lines) <= BESIDE_TABLE + 5 and lines[-1] == "and 41 ranks more: ecrm status"
    assert [line.split()[0] for line in lines[-6:-1]] == ["0", "1", "2", "3", "40"]
    assert not any("rank" in line for line in picture(standing, 80, found=ranks(4, 1), height=9))


def test_plain_lines_can_be_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(launcher, "launch", lambda *words: asked.append(words[-1]) or 0)
    assert main(["launch", "tiny"]) == main(["launch", "tiny", "--plain"]) == 0
    assert asked == [False, True]


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
            assert (screen_of(terminal, RunStatus(1), 1, FOLDER) is not None) == wanted
    os.close(reading)
    assert screen_of(io.StringIO(), RunStatus(1), 1, FOLDER) is None


def test_without_a_terminal_nothing_of_it_is_loaded():
    code = "import sys, ecrm.launch.launcher; sys.exit('rich' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

"""The bar of a run on a terminal: what it says, how wide it is, and that the run does not depend on it."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console

from ecrm.launch.run_status import Standing
from ecrm.launch.screen import PROGRESS_LINE, Screen, screen_of
from support.drilling import BASE, RUN_SECONDS, launch_words

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
        "loss": 0.5,
        "auc": 0.75,
        "failures_left": 1,
        "rebuilt": 1.0,
    }
    return {"event": "progress", "time": at, "step": step, **fields, **more}


def test_a_standing_is_what_the_events_say():
    standing = Standing(100)
    standing.take([START])
    assert standing.started and standing.seconds_left(100.0) is None
    standing.take([progress(10, 101.0), progress(30, 103.0)])
    assert (standing.step, standing.loss, standing.auc, standing.failures_left) == (
        30,
        0.5,
        0.75,
        1,
    )
    assert standing.seconds_left(103.0) == 7.0 and standing.seconds_left(105.0) == 5.0
    standing.take([FAILURE])
    assert (standing.rebuilding, standing.rebuilt, standing.failures_left) == ({1, 2}, 0.0, 0)
    standing.take([progress(40, 104.0, rebuilt=0.5, failures_left=0)])
    assert (standing.rebuilding, standing.rebuilt) == ({1, 2}, 0.5)
    standing.take([{"event": "rebuilt", "time": 104.5, "shards": [1], "failures_left": 1}])
    assert standing.rebuilding == {2} and not standing.finishing
    early = Standing(100, started=True, step=40)
    early.take([{"event": "ended_early", "time": 104.5, "step": 40, "steps_wanted": 100}])
    assert early.finishing
    standing.take([progress(100, 110.0)])
    assert standing.finishing and standing.seconds_left(111.0) == 0.0


def test_a_standing_goes_back_with_the_run():
    standing = Standing(100)
    standing.take([{**START, "resumed": {"step": 20}}])
    assert standing.step == 20
    rolled_back = {"event": "rolled_back", "time": 104.0, "step": 20}
    standing.take([progress(30, 101.0), FAILURE, rolled_back])
    assert (standing.step, standing.rebuilding) == (20, set())
    standing.take([progress(30, 106.0)])
    assert standing.seconds_left(106.0) == 14.0  # at the pace since the rollback
    standing.take([progress(30, 106.0)])
    assert standing.seconds_left(106.0) == 14.0


def picture(standing: Standing, width: int, stopping: bool = False, **more) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, _environ={}, **more)
    console.print(Screen(console, standing, 7)._picture(106.0, 65.0, stopping))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 40])
def test_a_picture_fits_the_terminal(width):
    standing = Standing(12_000)
    assert picture(standing, width, no_color=True) == ["starting 7 ranks  0:01:05"]
    standing.take([START, progress(50, 102.0), progress(4_000, 106.0), FAILURE])
    standing.take([progress(4_050, 106.1, rebuilt=0.43)])
    lines = picture(standing, width, stopping=True, no_color=True)
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith("step  4,050/12,000 ━")
    assert lines[0].rstrip().endswith("34%  0:00:12 left")
    assert lines[1].startswith("loss 0.5000  auc 0.7500  20,000 ")
    assert ("can survive 1 more at once" in lines[1]) == (width == 80)
    assert lines[2] == "rebuilding shards 1, 2: 43%"
    assert lines[3].startswith("stopping after this step")
    standing.take([progress(12_000, 120.0, loss=None, auc=None)])
    lines = picture(standing, width, no_color=True)
    assert "100%" in lines[0] and "left" not in lines[0] and lines[1].startswith("loss -  auc -  ")
    assert lines[-1] == "all steps done: evaluation and checks"


def test_no_color_is_heeded():
    standing = Standing(100)
    standing.take([START, progress(50, 102.0)])
    for off in (False, True):
        lines = picture(standing, 80, no_color=off, color_system="standard")
        assert ("\x1b[3" in "".join(lines)) != off


def test_only_a_terminal_that_can_redraw_has_a_screen(monkeypatch):
    reading, writing = os.openpty()
    with open(writing, "w") as terminal:
        for name, wanted in (("xterm-256color", True), ("dumb", False)):
            monkeypatch.setenv("TERM", name)
            assert (screen_of(terminal, Standing(1), 1) is not None) == wanted
    os.close(reading)
    assert screen_of(io.StringIO(), Standing(1), 1) is None


def test_without_a_terminal_nothing_of_it_is_loaded():
    code = "import sys, ecrm.launch.launcher; sys.exit('rich' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def on_a_terminal(words: list[str], columns: int, **environ: str) -> tuple[int, int]:
    """(pid, the terminal's other end) of a program that has a terminal of so many columns."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.environ.update({"TERM": "xterm", **environ})
        os.execv(words[0], words)
    resize(descriptor, columns)
    return pid, descriptor


def resize(descriptor: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def read(descriptor: int, until: bytes = b"\0never") -> bytes:
    """What comes from a terminal until some bytes are in it, or its program has ended."""
    data, deadline = b"", time.monotonic() + RUN_SECONDS
    while until not in data:
        assert time.monotonic() < deadline
        try:
            more = os.read(descriptor, 1 << 16)
        except OSError:
            return data
        if not more:
            return data
        data += more
    return data


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


RANKS = """
import json, pathlib, sys, time
folder, seconds = pathlib.Path(sys.argv[1]), float(sys.argv[2])
events = open(folder / "events.jsonl", "a", buffering=1)
def event(**fields): print(json.dumps({"time": time.time(), **fields}), file=events)
event(event="start")
for step in range(10, 101, 10):
    time.sleep(seconds / 10)
    event(event="progress", step=step, samples_per_second=1e3, loss=0.5, auc=0.75, rebuilt=1.0)
    print(f"step  {step}/100  1,000 samples/s  loss 0.5000", flush=True)
    print("said at", step, "x" * 100, flush=True)
    print("error at", step, file=sys.stderr, flush=True)
"""

SUPERVISED = """
import pathlib, sys
from ecrm.launch.supervise import supervise
from ecrm.launch.watch import watch_of
folder = pathlib.Path(sys.argv[1])
ending = supervise([sys.executable, *sys.argv[2:]], folder, 5.0, watch=watch_of(folder, 100, 7))
print("ended", ending.exit_code, ending.stopped_by, flush=True)
(folder / "ended").write_text(str(ending.exit_code))
"""


def supervised(tmp_path: Path, seconds: float) -> list[str]:
    program = tmp_path / "ranks.py"
    program.write_text(RANKS)
    return [
        sys.executable,
        "-c",
        SUPERVISED,
        str(tmp_path),
        str(program),
        str(tmp_path),
        str(seconds),
    ]


def test_lines_of_ranks_stand_above_the_bar_and_are_whole(tmp_path):
    pid, terminal = on_a_terminal(supervised(tmp_path, 3.0), 60)
    data = read(terminal, b" 40/100")
    resize(terminal, 40)
    shown = (data + read(terminal)).decode()
    assert exit_code(pid) == 0 and "ended 0 None" in shown
    for step in range(10, 101, 10):
        assert f"said at {step} {'x' * 100}\r\n" in shown and f"error at {step}\r\n" in shown
    assert "1,000 samples/s  loss" not in shown, "the bar says that"
    assert "loss 0.5000  auc 0.7500  1,000 /s" in shown
    assert "\x1b[?25h" in shown, "the cursor is back"


def test_ctrl_c_on_a_terminal_stops_the_run(tmp_path):
    pid, terminal = on_a_terminal(supervised(tmp_path, 60.0), 80)
    read(terminal, b"step ")
    os.write(terminal, b"\x03")
    shown = read(terminal).decode()
    assert exit_code(pid) == 0 and "ended -10 2" in shown.replace("Signals.SIGINT", "2"), shown
    assert "\x1b[?25h" in shown


def test_a_terminal_that_goes_away_does_not_stop_the_run(tmp_path):
    words = supervised(tmp_path, 2.0)
    unmoved = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])\n"
    words[2] = unmoved + words[2]
    pid, terminal = on_a_terminal(words, 80)
    read(terminal, b"step ")
    os.close(terminal)
    deadline = time.monotonic() + 30
    while len((tmp_path / "events.jsonl").read_text().splitlines()) < 11:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    exit_code(pid)


@pytest.mark.drill
def test_a_run_on_a_terminal_shows_a_bar_and_survives(tmp_path, criteo_rows, undisturbed):
    kills = ("1@12:parity",)
    sets = {**BASE, "protection.verify_parity_at_end": True, "protection.rebuild_rows_per_step": 8}
    words = launch_words(tmp_path / "run", criteo_rows, sets, kills)
    pid, terminal = on_a_terminal(words, 80, NO_COLOR="1")
    shown = read(terminal, b"starting 6 ranks").decode()
    resize(terminal, 40)
    shown += read(terminal).decode()
    assert exit_code(pid) == 0, shown
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["model_sha256"] == undisturbed
    )
    assert "\x1b[2Kstarting 6 ranks" in shown and "! rank 1 died in step 12" in shown
    assert "100%" in shown and f"model_sha256 {undisturbed}" in shown
    assert not any(PROGRESS_LINE.match(line) and "committed" in line for line in shown.splitlines())
    assert "\x1b[3" not in shown, "NO_COLOR"


def test_a_dumb_terminal_gets_plain_lines(tmp_path):
    pid, terminal = on_a_terminal(supervised(tmp_path, 0.5), 80, TERM="dumb")
    shown = read(terminal).decode()
    assert exit_code(pid) == 0 and "step  50/100  1,000 samples/s" in shown
    assert "\x1b" not in shown

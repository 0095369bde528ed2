"""The bar on a terminal, of processes that print, are stopped, or lose their terminal."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

from support.terminal import exit_code, on_a_terminal, read, resize

RANKS = """
import json, os, pathlib, socket, sys, time
folder, seconds = pathlib.Path(sys.argv[1]), float(sys.argv[2])
events = open(folder / "events.jsonl", "a", buffering=1)
def event(**fields): print(json.dumps({"time": time.time(), **fields}), file=events)
own = {"pid": os.getpid(), "host": socket.gethostname()}
def ranks(live):
    server, trainer = {**own, "shards": [0], "slots": []}, {**own, "shards": [], "slots": [0]}
    written = [{"rank": 0, "live": True, **server}, {"rank": 1, "live": live, **trainer}]
    (folder / "ranks.json").write_text(json.dumps({"ranks": written}))
ranks(live=True)
event(event="start")
for step in range(10, 101, 10):
    time.sleep(seconds / 10)
    event(event="progress", step=step, samples_per_second=1e3, logged={"loss": 0.5}, rebuilt=1.0)
    print(f"step  {step}/100  1,000 samples/s  loss 0.5000", flush=True)
    if step == 50:
        ranks(live=False)
        print("! rank 1 died in step 50 (parity)", flush=True)
    print("said at", step, "x" * 100, flush=True)
    print("error at", step, file=sys.stderr, flush=True)
"""

SUPERVISED = """
import os, pathlib, sys
from ecrm.launch.supervise import supervise
from ecrm.launch.watch import watch_of
folder = pathlib.Path(sys.argv[1])
watch = watch_of(folder, 100, 7, plain="PLAIN" in os.environ)
ending = supervise([sys.executable, *sys.argv[2:]], folder, 5.0, watch=watch)
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
    assert "loss 0.5000  1,000 /s" in shown
    assert re.search(r"   0  server +alive +\d+ MB", shown), "no host and no pid in 60 columns"
    assert re.search(r"   1  trainer +alive +\d+ MB.*   1  - +dead +-", shown, re.DOTALL)
    assert re.search(r"\ds ago  ! rank 1 died in step 50", shown)
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


@pytest.mark.parametrize("variable", ["TERM", "PLAIN"])
def test_a_dumb_terminal_or_a_plain_run_gets_plain_lines(tmp_path, variable):
    pid, terminal = on_a_terminal(supervised(tmp_path, 0.5), 80, **{variable: "dumb"})
    shown = read(terminal).decode()
    assert exit_code(pid) == 0 and "step  50/100  1,000 samples/s" in shown
    assert "\x1b" not in shown

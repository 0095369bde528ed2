"""The state of a run as seen from another shell: `ecrm status`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from ecrm.launch.run_state import as_text, run_state
from support.commands import assert_one_line, forked_ecrm

HOLDER = """
import sys, time
from pathlib import Path
from ecrm.run.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), "here")
lock.take()
print("held", flush=True)
time.sleep(60)
"""
START = {"event": "start", "config": {"train": {"steps": 200}}, "failures_left": 1}


def progress(step: int) -> dict:
    pace = {"samples_per_second": 20_000.0, "steps_per_second": 10.0, "rebuilt": 1.0}
    return {"event": "progress", "step": step, "logged": {"loss": 0.5}, "failures_left": 1, **pace}


FAILURE = {"event": "failure", "shards": {"1": 6}, "moved": {}, "failures_left": 0}


def rank(number: int, **more) -> dict:
    idle = {"live": True, "shards": [], "slots": [], "dense": False, "spare": False}
    return {"rank": number, "pid": os.getpid(), "host": socket.gethostname(), **idle, **more}


@contextlib.contextmanager
def held(folder):
    """The folder as held by a living rank."""
    words = [sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def folder(tmp_path):
    """Makes a run folder with some events, one each second up to now, and ranks."""

    def make(*events: dict, ranks=(), **files: dict):
        now = time.time()
        times = range(len(events) - 1, -1, -1)
        lines = [{"time": now - ago, **event} for ago, event in zip(times, events, strict=True)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "events.jsonl").write_text(text)
        (tmp_path / "ranks.json").write_text(json.dumps({"ranks": list(ranks)}))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return make


def test_a_living_run_tells_progress_failures_and_ranks(folder):
    ranks = [
        rank(0, shards=[0]),
        rank(1, live=False),
        rank(2, slots=[0, 1], dense=True),
        rank(3, shards=[2], slots=[2], host="elsewhere"),
        rank(4, spare=True, pid=2**22 + 1),
        rank(6, shards=[1]),
    ]
    path = folder(START, progress(20), progress(40), FAILURE, ranks=ranks)
    with held(path):
        state = run_state(path)
    assert (state.state, state.exit_code, state.alive) == ("training", 0, True)
    assert (state.step, state.steps, state.samples_per_second) == (40, 200, 20_000.0)
    assert (state.failures, state.failures_left, state.rebuilding) == (1, 0, [1])
    assert 0 <= state.told_seconds < 30
    roles = {each.rank: (each.role, each.state) for each in state.ranks}
    assert roles == {
        0: ("server", "alive"),
        1: ("-", "dead"),
        2: ("trainer", "alive"),
        3: ("server and trainer", "alive"),
        4: ("spare", "gone"),
        6: ("server", "rebuilding"),
    }
    known = {each.rank for each in state.ranks if each.memory_bytes}
    assert known == {0, 2, 6}, "processes of this host alone"
    text = as_text(state)
    assert "step      40 of 200" in text and "20,000 samples/s" in text
    assert "1 failure, can survive 0 more at once" in text and "rebuilding" in text


def test_a_reused_pid_is_no_rank(folder):
    path = folder(START, ranks=[rank(0, shards=[0])])
    os.utime(path / "ranks.json", (1_000_000_000, 1_000_000_000))
    with held(path):
        (found,) = run_state(path).ranks
    assert (found.state, found.memory_bytes) == ("gone", None)


def test_a_run_starts_trains_and_finishes(folder):
    path = folder()
    with held(path):
        assert run_state(path).state == "starting"
        assert run_state(folder(START)).state == "training"
        assert run_state(folder(START, progress(200))).state == "finishing"
        # a script may train a second session
        done = folder(START, progress(200), summary={"completed": True})
        assert run_state(done).state == "finishing"
    assert run_state(done).state == "complete"


@pytest.mark.parametrize(
    ("files", "code", "said"),
    [
        ({"summary": {"completed": True}}, 0, "state     complete"),
        ({"stopped": {"signal": "SIGTERM"}}, 130, "stopped: stopped by SIGTERM"),
        ({"failure": {"message": "too many", "exit_code": 3}}, 3, "failed: too many"),
        ({"rejected": {"completed": False}}, 5, "rejected: the parity held"),
        ({}, 1, "died: all ranks ended without a word"),
    ],
)
def test_an_ended_run_says_so_and_gives_its_exit_code(folder, files, code, said):
    path = folder(START, progress(40), ranks=[rank(0, shards=[0])], **files)
    done = forked_ecrm("status", str(path))
    assert (done.returncode, done.stderr) == (code, "")
    assert said in done.stdout and "ended" in done.stdout
    assert "can survive" not in done.stdout
    told = json.loads(forked_ecrm("status", str(path), "--json").stdout)
    assert told["exit_code"] == code and told["ranks"][0]["state"] == "ended"


def test_a_folder_without_a_run_is_refused(tmp_path):
    assert_one_line(forked_ecrm("status", str(tmp_path)), "holds no run; name the folder given as")
    assert_one_line(forked_ecrm("status", str(tmp_path / "absent")), "holds no run")


def test_a_second_session_is_the_one_told(folder):
    path = folder(START, progress(200), summary={"completed": True, "sessions": 2})
    second = path / "session-2"
    second.mkdir()
    lines = [{"time": time.time(), **event} for event in (START, progress(60))]
    (second / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with held(path):
        state = run_state(path)
    assert (state.state, state.step) == ("training", 60)

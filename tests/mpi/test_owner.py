"""One owner per run folder: who holds it is told, and it is free as soon as all ranks are gone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ecrm.errors import UsageError
from ecrm.run.run_lock import LOCK, RunLock, check_run_dir, remove_empty
from support.drilling import BASE, RUN_SECONDS, Mpirun, launch_words, mpirun_line

HOLD = """
import os, sys, time
from pathlib import Path
from ecrm.run.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), "here")
getattr(lock, sys.argv[2])()
if sys.argv[2] == "take": os.fork()
print("holds", os.getpid(), flush=True)
time.sleep(60)
"""


def holder(folder: Path, how: str, run: str = "one") -> subprocess.Popen:
    """A process that holds a folder."""
    words = [sys.executable, "-c", HOLD, str(folder), how]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "ECRM_LAUNCH": run}
    )
    assert process.stdout.readline().startswith("holds")
    return process


def test_who_holds_a_folder_is_told_until_its_last_rank_is_gone(tmp_path):
    first, second = holder(tmp_path, "take"), holder(tmp_path, "join")
    try:
        for look in (lambda: check_run_dir(tmp_path), lambda: RunLock(tmp_path, "there").take()):
            began = time.monotonic()
            with pytest.raises(
                UsageError,
                match=rf"in use by a run that is alive, on host here since .*kill (?:{first.pid}|{second.pid}):?",
            ):
                look()
            assert time.monotonic() - began < 2
        first.kill()  # the child that it has forked lives on, and holds nothing
        first.wait()
        with pytest.raises(UsageError, match=f"in use .*kill {second.pid}"):
            check_run_dir(tmp_path)
        second.kill()
        second.wait()
        check_run_dir(tmp_path)
        lock = RunLock(tmp_path, "there")
        lock.take()
        assert json.loads((tmp_path / LOCK).read_text())["host"] == "there"
    finally:
        for process in (first, second):
            process.kill()
            process.wait()


def test_a_lock_that_was_removed_meanwhile_is_made_anew(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    late = RunLock(folder, "late")
    remove_empty(folder)
    assert not folder.exists()
    folder.mkdir()
    late.take()
    process = subprocess.run(
        [sys.executable, "-c", HOLD, str(folder), "take"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "in use by a run that is alive, on host late" in process.stderr
    with pytest.raises(OSError):
        remove_empty(folder.with_name("nothing"))


@pytest.mark.drill
def test_of_two_runs_in_one_folder_one_is_refused_and_the_other_goes_on(tmp_path, criteo_rows):
    """Two launches at once; a third, and a line typed by hand, while the first runs; then everything is killed, and the folder is free."""
    folder = tmp_path / "run"
    words = launch_words(folder, criteo_rows, {**BASE, "train.steps": 4000})
    launches = [
        subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for _ in range(2)
    ]
    deadline = time.monotonic() + RUN_SECONDS
    while all(process.poll() is None for process in launches):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    lost, won = sorted(launches, key=lambda process: process.poll() is None)
    said = lost.communicate()[0]
    assert lost.returncode == 2 and won.poll() is None, said
    (error,) = re.findall("ecrm: error: .*", said)
    assert f"{folder}: in use by a run that is alive, on host " in error and "since 2" in error
    while not (folder / "events.jsonl").exists():
        assert time.monotonic() < deadline and won.poll() is None
        time.sleep(0.05)
    third = subprocess.run(words, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert (
        third.returncode == 2 and "in use by a run" in third.stderr and "mpirun" not in third.stdout
    )
    byhand = Mpirun(
        [
            word.replace(str(tmp_path / "other"), str(folder))
            for word in mpirun_line(tmp_path / "other", criteo_rows, BASE)
        ]
    )
    code, output = byhand.end(RUN_SECONDS)
    assert code == 2 and output.count("in use by a run") == 1, output
    assert won.poll() is None
    ranks = [rank["pid"] for rank in json.loads((folder / "ranks.json").read_text())["ranks"]]
    with pytest.raises(UsageError, match="in use"):
        check_run_dir(folder)
    for pid in (won.pid, *ranks):
        os.kill(pid, signal.SIGKILL)
    won.communicate()
    with pytest.raises(UsageError, match="not empty"):
        check_run_dir(folder)

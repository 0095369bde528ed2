"""One owner per run folder: who holds it is told, and it is free as soon as all ranks are gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ecrm.errors import UsageError
from ecrm.run.run_lock import LOCK, RunLock, check_run_dir, remove_empty

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

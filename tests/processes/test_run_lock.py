"""One owner per run folder: who holds it is told, and it is free as soon as all ranks are gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ecrm.base.errors import UsageError
from ecrm.base.lock_holders import UNSEEN_SECONDS
from ecrm.run.run_lock import (
    LOCK,
    RECORD_BYTES,
    RunLock,
    _refuse,
    check_run_dir,
    remove_empty,
)

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
                match=rf"in use by a run that is alive, on host here since .*kill "
                rf"(?:{first.pid}|{second.pid}):?",
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


def test_the_process_to_kill_goes_with_its_own_host(tmp_path):
    """A run owned by a rank on another host also has a rank here.

    The system reports the process of the rank that is here.
    """
    first = holder(tmp_path, "take")
    try:
        record = json.loads((tmp_path / LOCK).read_text())
        elsewhere = json.dumps({**record, "host": "elsewhere", "pid": 1}).ljust(511) + "\n"
        descriptor = os.open(tmp_path / LOCK, os.O_WRONLY)  # closing it in a holder lets go
        os.pwrite(descriptor, elsewhere.encode(), 0)
        os.close(descriptor)
        with pytest.raises(UsageError, match=rf"on host elsewhere .*kill {first.pid} on this host"):
            check_run_dir(tmp_path)
        with pytest.raises(UsageError, match="on host elsewhere .*kill 1 on host elsewhere, or"):
            _refuse(tmp_path, 0, UNSEEN_SECONDS)  # as where no process is seen here
    finally:
        first.kill()
        first.wait()


def test_a_record_of_an_owner_is_whole_whatever_was_there(tmp_path):
    (tmp_path / LOCK).write_text("x" * 2 * RECORD_BYTES)
    RunLock(tmp_path, "here").take()
    assert (tmp_path / LOCK).stat().st_size == RECORD_BYTES
    record = json.loads((tmp_path / LOCK).read_text())
    assert record["host"] == "here" and set(record) == {"run", "host", "pid", "since"}


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

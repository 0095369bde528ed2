"""A file that another process is writing: a dead one is waited for, a live one is told."""

import fcntl
import subprocess
import sys
import time

import pytest

from ecrm.base import atomic_files, lock_holders
from ecrm.base.atomic_files import staged_file
from ecrm.base.errors import UsageError

HOLDS = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("holds", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def holding(tmp_path):
    """Starts a process that writes model.pt, as far as others see, for so many seconds."""
    started = []

    def hold(seconds: float) -> subprocess.Popen:
        words = [sys.executable, "-c", HOLDS, str(tmp_path / ".model.pt.writing"), str(seconds)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "holds\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def written(folder) -> bytes:
    with staged_file(folder / "model.pt") as file:
        file.write(b"new")
    return (folder / "model.pt").read_bytes()


def test_the_holder_of_a_lock_is_seen(tmp_path, holding):
    process = holding(100)
    with open(tmp_path / ".model.pt.writing") as file:
        assert lock_holders.holder_of(file.fileno()) == process.pid
        process.kill()
        process.wait()
        assert lock_holders.holder_of(file.fileno()) == 0
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_live_writer_is_told_soon(tmp_path, holding):
    holding(100)
    began = time.monotonic()
    with pytest.raises(UsageError, match="another process is writing it"):
        written(tmp_path)
    assert time.monotonic() - began < lock_holders.LIVES_SECONDS + 5


def test_a_dead_writer_is_waited_for_whose_lock_outlives_it(tmp_path, holding, monkeypatch):
    """Here it is alive, and taken for one whose memory is being taken back."""
    monkeypatch.setattr(atomic_files, "patience", lambda holder: lock_holders.DYING_SECONDS)
    holding(1.5)
    assert written(tmp_path) == b"new"


def test_a_process_without_an_entry_is_as_good_as_dead():
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert lock_holders.patience(gone.pid) == lock_holders.DYING_SECONDS
    assert lock_holders.patience(1) == lock_holders.LIVES_SECONDS
    assert lock_holders.patience(0) == lock_holders.UNSEEN_SECONDS

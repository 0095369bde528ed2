"""A guard that stands stopped is killed by its neighbours: real processes, the test's own clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ecrm.process.neighbours import Neighbours, PidNotes

GUARD = "import time\nwhile True: time.sleep(0.01)"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def guard() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, "-c", GUARD])
    yield process
    process.kill()
    process.wait()


class Looking:
    """Rank 0's neighbours, with a clock, and the pids that it kills instead of killing them."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.now, self.killed = 0.0, []
        environ = {
            "PMIX_SERVER_TMPDIR": str(folder),
            "PMIX_NAMESPACE": "job@1",
            "PMIX_RANK": str(rank),
        }
        self.board = PidNotes(environ)
        self._neighbours = Neighbours(
            2.0, environ, lambda: self.now, lambda pid, _: self.killed.append(pid)
        )

    def at(self, now: float) -> list[int]:
        self.now = now
        self._neighbours.look()
        return self.killed


def stop(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGSTOP)
    until(lambda: state(process.pid) == "T")


def test_one_that_stands_stopped_is_killed(tmp_path, guard):
    looking = Looking(tmp_path)
    looking.board.put(1, guard.pid)
    assert looking.at(0.0) == []
    stop(guard)
    assert looking.at(10.0) == looking.at(11.9) == []
    assert looking.at(12.0) == [guard.pid]


def test_those_behind_one_that_is_stopped_are_looked_after_too(tmp_path, guard):
    """Ranks 1 and 2 stand, rank 3 runs and rank 0 asks; after rank 3 it is rank 3 that looks."""
    looking = Looking(tmp_path)
    others = [subprocess.Popen([sys.executable, "-c", GUARD]) for _ in range(3)]
    try:
        for rank, process in enumerate((guard, *others), start=1):
            looking.board.put(rank, process.pid)
        for process in (guard, others[0], others[2]):
            stop(process)
        looking.at(0.0)
        assert sorted(looking.at(2.0)) == sorted((guard.pid, others[0].pid))
        third = Looking(tmp_path, rank=3)
        third.at(0.0)
        assert third.at(2.0)[0] == others[2].pid
    finally:
        for process in others:
            process.kill()
            process.wait()


def test_a_note_of_another_host_is_not_looked_at(tmp_path, guard, monkeypatch):
    """Hosts may have the job's folder in common: the pid is another process here."""
    looking = Looking(tmp_path)
    with monkeypatch.context() as there:
        there.setattr(os, "uname", lambda: SimpleNamespace(nodename="another"))
        other = Looking(tmp_path)
        other.board.put(1, guard.pid)
        other.board.put_loaded(1)
    stop(guard)
    assert looking.at(0.0) == looking.at(10.0) == []
    assert looking.board.loaded() == 0 and other.board.loaded() == 1


def test_one_that_runs_in_between_is_left_alone(tmp_path, guard):
    """Though it is stopped whenever one looks."""
    looking = Looking(tmp_path)
    looking.board.put(1, guard.pid)
    for now in (0.0, 1.0, 2.0, 3.0, 4.0):
        stop(guard)
        assert looking.at(now) == []
        guard.send_signal(signal.SIGCONT)
        time.sleep(0.1)


def test_one_that_is_slow_or_gone_or_oneself_is_left_alone(tmp_path, guard):
    looking = Looking(tmp_path)
    looking.board.put(1, guard.pid)
    looking.board.put(0, os.getpid())
    assert looking.at(0.0) == looking.at(100.0) == []
    guard.kill()
    guard.wait()
    assert looking.at(200.0) == looking.at(300.0) == []
    assert Looking(tmp_path / "nowhere").at(0.0) == []


@pytest.mark.parametrize("how", ["it ends", "it is stopped", "it goes on"])
def test_ranks_that_run_are_awaited_for_a_time(tmp_path, guard, how):
    board = Looking(tmp_path).board
    board.put(0, os.getpid(), 0)
    board.put(1, os.getpid(), guard.pid)
    began = time.monotonic()
    board.await_ranks(0.3)
    assert time.monotonic() - began >= 0.3
    if how == "it goes on":
        return
    threading.Timer(0.3, (stop if how == "it is stopped" else kill), [guard]).start()
    began = time.monotonic()
    board.await_ranks(20)
    assert 0.2 < time.monotonic() - began < 10


def test_a_single_guard_of_a_host_is_the_first_to_leave(tmp_path):
    first, second = Looking(tmp_path).board, Looking(tmp_path, rank=1).board
    first.put(0, os.getpid())
    assert first.is_first_to_leave()
    assert not second.is_first_to_leave() and not first.is_first_to_leave()


def test_without_a_folder_every_guard_is_the_first_to_leave(tmp_path):
    board = Looking(tmp_path / "nowhere").board
    assert board.is_first_to_leave() and board.is_first_to_leave()


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def test_a_later_process_with_the_same_pid_is_left_alone(tmp_path, guard):
    looking = Looking(tmp_path)
    looking.board.put(1, guard.pid)
    note = next(tmp_path.glob("*/1"))
    note.write_text(f"{guard.pid} 1 0")
    stop(guard)
    assert looking.at(0.0) == looking.at(100.0) == []

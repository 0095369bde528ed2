"""Ranks of one host forked from one process: one import, and each rank with its own guard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ecrm.process import fork_server
from ecrm.process.neighbours import JOB, RANK
from ecrm.process.preflight import JOB_FOLDER
from ecrm.process.remote_agent import GUARD_PATIENCE
from support.drilling import is_running

PROGRAM = """
import os, sys
from ecrm.process.guard import guard
guarded = guard(5.0, 20.0, load=("counted",))
guarded.up()
print(os.getpid(), os.getppid(), os.environ["PMIX_RANK"], "counted" in sys.modules, flush=True)
sys.stdin.readline()
guarded.done(7)
os._exit(7)
"""

Start = Callable[..., subprocess.Popen]


class Rank:
    """A guard, and the answer of its rank."""

    def __init__(self, guard: subprocess.Popen) -> None:
        self.guard = guard
        pid, parent, number, has_module = guard.stdout.readline().split()
        self.pid, self.parent, self.number = int(pid), int(parent), int(number)
        self.has_module = has_module == "True"


@pytest.fixture
def imports(tmp_path: Path) -> Path:
    """A file that gets a line for every import of the module `counted`."""
    (tmp_path / "counted.py").write_text(
        f"import time\nprint('imported', file=open({str(tmp_path / 'imports')!r}, 'a'))\n"
        "time.sleep(0.5)\n"
    )
    return tmp_path / "imports"


@pytest.fixture
def start(imports: Path) -> Iterator[Start]:
    guards: list[subprocess.Popen] = []

    def begin(rank: int, program: str = PROGRAM, **variables: str) -> subprocess.Popen:
        job = {JOB_FOLDER: str(imports.parent), JOB: "a job", RANK: str(rank)}
        path = {"PYTHONPATH": f"{imports.parent}:{os.environ.get('PYTHONPATH', '')}"}
        guards.append(
            subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **path, **job, **variables},
            )
        )
        return guards[-1]

    yield begin
    for guard in guards:
        guard.kill()
        guard.communicate()


def count(imports: Path) -> int:
    return imports.read_text().count("imported")


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_all_ranks_come_from_one_import_and_each_obeys_its_own_guard(start, imports):
    first, second, third = [Rank(guard) for guard in [start(rank) for rank in range(3)]]
    ranks = [first, second, third]
    assert count(imports) == 1 and all(rank.has_module for rank in ranks)
    assert len({rank.parent for rank in ranks}) == 1 and first.parent != first.guard.pid
    assert [rank.number for rank in ranks] == [0, 1, 2], "each has its own variables and output"
    second.guard.kill()
    wait_until(lambda: not is_running(second.pid))
    os.kill(third.pid, signal.SIGKILL)
    assert third.guard.wait(10) == -signal.SIGKILL
    assert is_running(first.pid) and is_running(first.parent)
    _, errors = first.guard.communicate("\n", timeout=10)
    assert (first.guard.returncode, errors) == (7, "")
    wait_until(lambda: not is_running(first.parent))


def test_guards_of_hosts_with_a_common_folder_do_not_share_ranks(monkeypatch):
    here = fork_server._digest("", {})
    assert fork_server._digest("", {}) == here
    monkeypatch.setattr(fork_server.os, "uname", lambda: SimpleNamespace(nodename="another"))
    assert fork_server._digest("", {}) != here


def test_guards_with_another_program_or_other_variables_do_not_share_ranks(start, imports):
    ranks = [
        Rank(start(0)),
        Rank(start(1, PROGRAM + "\n")),
        Rank(start(2, OWN="variable")),
    ]
    assert count(imports) == 3 and len({rank.parent for rank in ranks}) == 3


def test_a_rank_of_an_agent_is_the_child_of_its_guard(start, imports):
    """An agent ends its descendants, and must not end ranks of other agents."""
    rank = Rank(start(0, **{GUARD_PATIENCE: "100"}))
    assert rank.parent == rank.guard.pid and not rank.has_module and not imports.exists()


def test_a_server_that_dies_before_the_ranks_ends_the_start(start, imports):
    slow = PROGRAM.replace('("counted",)', '("counted", "sleeping")')
    (imports.parent / "sleeping.py").write_text(
        f"import os, time\nopen({str(imports.parent / 'server')!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    guards = [start(rank, slow) for rank in range(2)]
    server = imports.parent / "server"
    wait_until(lambda: server.exists() and server.read_text() != "")
    os.kill(int(server.read_text()), signal.SIGKILL)
    for guard in guards:
        assert guard.wait(10) == 3
    said = "".join(guard.stderr.read() for guard in guards)
    assert "died before MPI was up: start the run again" in said


def test_a_guard_asked_to_stop_before_its_rank_is_there_ends(start, imports):
    guard = start(0, PROGRAM.replace("guard(5.0", "open('/dev/null'); guard(5.0"))
    wait_until(imports.exists)
    time.sleep(0.1)
    guard.send_signal(signal.SIGUSR1)
    assert guard.wait(10) == -signal.SIGKILL
    assert guard.stdout.read() == "", "a rank has begun without a guard"


def test_a_module_that_cannot_be_imported_is_left_to_the_ranks(start, imports):
    missing = PROGRAM.replace('("counted",)', '("no_such_module", "counted")')
    rank = Rank(start(0, missing))
    assert rank.has_module and count(imports) == 1


def test_the_error_of_a_module_is_printed_but_for_one_that_is_not_there(tmp_path):
    """A second import of torch fails by another error, so the first must be seen."""
    (tmp_path / "torn.py").write_text("raise RuntimeError('no such log')")
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            "from ecrm.process.fork_server import import_at_once\n"
            "import_at_once(['no_such_module', 'torn', 'json'])",
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "RuntimeError: no such log" in ran.stderr and "no_such_module" not in ran.stderr

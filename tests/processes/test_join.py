"""Ranks that join: their agent, their output, and their ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from ecrm.run.joining import FILE, JoinFile
from ecrm.transport.membership_socket import Rendezvous
from support.drilling import is_running

KEEP_ALIVE = 1.0
JOIN = (
    "import sys, pathlib, ecrm.launch.remote_run as run; run.LEAVE_SECONDS = 0.2; "
    "from ecrm.launch.join import join; sys.exit(join(pathlib.Path(sys.argv[1]), 'node'))"
)


@pytest.fixture
def joining(tmp_path):
    """Starts `ecrm join` for two lost ranks, which run a command of a shell."""
    begun = []

    def start(command):
        links = Rendezvous(bytes(16), b"secret", ("127.0.0.1", 9), KEEP_ALIVE).text()
        words = ["sh", "-c", command]
        file = JoinFile(links, ["node", "node"], str(tmp_path), words, {}, [])
        (tmp_path / FILE).write_text(json.dumps(asdict(file)))
        ranks = [{"rank": rank, "live": False} for rank in range(2)]
        (tmp_path / "ranks.json").write_text(json.dumps({"ranks": ranks}))
        begun.append(
            subprocess.Popen(
                [sys.executable, "-c", JOIN, str(tmp_path)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate(timeout=20)


def test_a_rank_that_is_refused_ends_no_other_rank(joining):
    run = joining("test $PMIX_RANK = 0 && exit 3; sleep 1; echo $PMIX_RANK goes on")
    said, _ = run.communicate(timeout=60)
    assert "1 goes on\n" in said and run.returncode == 3


def test_a_rank_that_dies_is_told_by_the_exit_code(joining):
    run = joining("test $PMIX_RANK = 0 && exit 0; kill -9 $$")
    assert run.wait(60) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_of_a_rank_outlives_the_command(joining, tmp_path, number):
    run = joining(
        "sleep 100 & echo $! > pid$PMIX_RANK.new; mv pid$PMIX_RANK.new pid$PMIX_RANK; wait"
    )
    files, deadline = [tmp_path / f"pid{rank}" for rank in range(2)], time.monotonic() + 30
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pids = [int(file.read_text()) for file in files]
    assert all(map(is_running, pids))
    run.send_signal(number)
    run.wait(20)
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)

"""A run on one machine listens on the loopback alone: mpirun, guards and ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from ecrm.process.linux import session_members
from support.drilling import LONG, Mpirun, Run, environ_of, launch_words, mpirun_line

LOOPBACK = {"127.0.0.1", "[::1]"}


def listening(pids: Iterable[int]) -> set[tuple[str, str]]:
    """The programs and addresses of the listening TCP sockets of processes, and of UDP's."""
    found = set()
    for kind in ("-ltnpH", "-lunpH"):
        for line in subprocess.run(
            ["ss", kind], capture_output=True, text=True
        ).stdout.splitlines():
            for name, pid in re.findall(r'"([^"]+)",pid=(\d+)', line):
                if int(pid) in pids:
                    found.add((name, line.split()[3].rpartition(":")[0]))
    return found


def wait_for_steps(folder: Path, process: subprocess.Popen) -> list[dict]:
    """The ranks, once steps are done."""
    run, deadline = Run(0, "", folder), time.monotonic() + 120
    while not (folder / "events.jsonl").exists() or not run.events_of("progress"):
        assert time.monotonic() < deadline and process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    return run.ranks


@pytest.mark.parametrize("more", [(), ("--mpirun-args=--mca btl self,tcp",)], ids=["own", "tcp"])
def test_a_run_on_one_machine_listens_on_the_loopback_alone(tmp_path, criteo_rows, more):
    """The twin's ranks talk by TCP, and listen for that."""
    folder = tmp_path / "run"
    words = [*launch_words(folder, criteo_rows, LONG), *more]
    launch = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "LD_PRELOAD": "libm.so.6"},
    )
    try:
        ranks = wait_for_steps(folder, launch)
        (mpirun,) = children(launch.pid)
        pids = {launch.pid, *session_members(mpirun), *(rank["pid"] for rank in ranks)}
        found = listening(pids)
        assert any(name == "prterun" for name, _ in found), found
        assert {address for _, address in found} <= LOOPBACK or more, found
        assert not more or {address for _, address in found} - LOOPBACK, found
        assert {environ_of(rank["pid"])["LD_PRELOAD"] for rank in ranks} == {"libm.so.6"}
    finally:
        launch.send_signal(signal.SIGTERM)
        launch.communicate(timeout=60)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_line_of_mpirun_typed_by_hand_listens_on_all_addresses(tmp_path, criteo_rows):
    """The twin of mpirun itself."""
    folder = tmp_path / "run"
    mpirun = Mpirun(mpirun_line(folder, criteo_rows, LONG))
    wait_for_steps(folder, mpirun.process)
    found = listening({*mpirun.members})
    mpirun.process.send_signal(signal.SIGUSR1)
    mpirun.end(60)
    assert {address for name, address in found if name == "prterun"} - LOOPBACK, found

"""`ecrm status` beside a real run: training, with a rank killed, and stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from support.commands import ecrm
from support.drilling import LONG, RUN_SECONDS, launch_words


def named(rank: dict) -> str:
    """The name of a rank's process in `ps`."""
    return Path(f"/proc/{rank['pid']}/comm").read_text().rstrip("\n")


def until(folder, wanted):
    """The first state for which `wanted` is true."""
    deadline = time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline:
        done = ecrm("status", str(folder), "--json")
        if done.returncode == 0 and wanted(state := json.loads(done.stdout)):
            return state
        time.sleep(0.1)
    raise AssertionError(done.stdout + done.stderr)


def test_status_follows_a_run_through_a_kill_to_its_end(tmp_path, criteo_rows):
    folder = tmp_path / "run"
    sets = {**LONG, "train.steps": 100_000, "train.log_every_steps": 10}
    words = launch_words(folder, criteo_rows, sets)
    run = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        state = until(folder, lambda state: state["step"] > 0)
        assert (state["state"], state["steps"], state["failures"]) == ("training", 100_000, 0)
        assert all(rank["state"] == "alive" for rank in state["ranks"])
        assert all(rank["memory_bytes"] > 30e6 for rank in state["ranks"])
        victim = next(rank for rank in state["ranks"] if rank["role"] == "server")
        assert all(named(rank) == f"ecrm {rank['rank']} {rank['role']}" for rank in state["ranks"])
        os.kill(victim["pid"], signal.SIGKILL)
        state = until(folder, lambda state: state["failures"] == 1)
        dead = [rank["rank"] for rank in state["ranks"] if rank["state"] == "dead"]
        assert dead == [victim["rank"]]
        assert all(
            named(rank) == f"ecrm {rank['rank']} {rank['role']}"
            for rank in state["ranks"]
            if rank["state"] != "dead"
        ), "also the rank that has taken over"
        run.send_signal(signal.SIGTERM)
        assert run.wait(RUN_SECONDS) == 130
    finally:
        run.kill()
        run.wait()
    done = ecrm("status", str(folder))
    assert done.returncode == 130 and "stopped by SIGTERM" in done.stdout

"""Runs that get a signal, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ecrm.run.files import STOPPED, check_summary, undescribed
from support.drilling import RUN_SECONDS, is_running
from support.paths import PROGRAMS

MISBEHAVING = str(PROGRAMS / "misbehaving.py")


def launch_options(folder: Path, data: Path, *sets: str) -> list[str]:
    words = ["tiny", "--run-dir", str(folder)]
    for one in (f"data.path={data}", "train.steps=5000", "model.dense_arch=native", *sets):
        words += ["--set", one]
    return words


def begun(folder: Path, line: list[str], event: str = "progress") -> subprocess.Popen:
    """Start it and wait for the first such event."""
    process = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment(folder),
    )
    deadline = time.monotonic() + RUN_SECONDS
    file = folder / "events.jsonl"
    while not file.exists() or f'"event": "{event}"' not in file.read_text():
        if time.monotonic() > deadline or process.poll() is not None:
            process.kill()
            raise AssertionError(f"no {event}: {process.communicate()[0]}")
        time.sleep(0.02)
    return process


def environment(folder: Path) -> dict[str, str]:
    codes = folder.with_name("codes")
    codes.mkdir()
    return {**os.environ, "OMP_NUM_THREADS": "1", "ECRM_TEST_CODES": str(codes)}


def launch_line(
    folder: Path, data: Path, *sets: str, more: tuple[str, ...] = (), how: str = "nothing"
) -> list[str]:
    return [sys.executable, MISBEHAVING, how, "launch", *launch_options(folder, data, *sets), *more]


def check_codes(folder: Path, dead: tuple[int, ...] = ()) -> None:
    """Every rank has ended with 0, but for those killed."""
    codes = {int(file.name): int(file.read_text()) for file in folder.with_name("codes").iterdir()}
    assert codes == {rank: -signal.SIGKILL if rank in dead else 0 for rank in range(6)}


def stopped_json(folder: Path) -> dict:
    assert not (folder / "summary.json").exists()
    stopped = json.loads((folder / "stopped.json").read_text())
    check_summary(stopped, STOPPED)
    assert undescribed(folder) == []
    return stopped


def check_gone(folder: Path) -> None:
    ranks = json.loads((folder / "ranks.json").read_text())["ranks"]
    assert [rank["pid"] for rank in ranks if is_running(rank["pid"])] == []

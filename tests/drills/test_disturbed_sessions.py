"""Ranks killed from outside, anywhere in a session: the same files as without.

`make drill ARGS="tests/drills/test_disturbed_sessions.py"` kills in 120 runs, in about an hour on
two cores.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from shutil import copy

import pytest

from support.commands import ECRM
from support.paths import PROGRAMS

LAYOUT = ("--servers", "3", "--trainers", "2", "--spares", "2")
PROTECTIONS = {
    "erasure": ("-k", "2", "-m", "1"),
    "parity": ("-k", "1", "-m", "1"),
    "chain": (),
    "replicate": (),
    "checkpoint": (),
    "mapped": (),
    "stateless": (),
    "none": (),
}
WITHOUT_SERVERS = {"stateless", "none"}
"""Whoever loses a server here loses rows, or updates of them."""
PHASES = ("step", "checkpoint", "evaluation", "save", "exit")
SEEDS = range(3)
FILES = [*(f"model-{step}.safetensors" for step in (4, 8, 12, 16)), "last.pt", "log.csv"]
LATEST_SECONDS = 0.08
"""So long after a rank has come to a phase another one is killed, at most."""


def started(folder: Path, name: str, *words: str) -> subprocess.Popen[str]:
    copy(PROGRAMS / "disturbed.py", folder / "train.py")
    protection = "erasure" if name == "parity" else name
    options = ("--protection", protection, *PROTECTIONS[name], "--run-dir", "run", *words)
    line = [*ECRM, "launch", "train.py", *LAYOUT, "--set", "checkpoint.every_steps=4", *options]
    return subprocess.Popen(
        [*line, "--", str(folder)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def model_of(folder: Path) -> str:
    return json.loads((folder / "run" / "summary.json").read_text())["model_sha256"]


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("calm")
    run = started(folder, "erasure")
    said, _ = run.communicate(timeout=200)
    assert run.returncode == 0, said
    return folder


def kill_in(run: subprocess.Popen[str], folder: Path, phase: str, servers: bool, seed: int) -> int:
    """Kill a rank soon after one has come to a phase; returns which."""
    draws = random.Random(f"{phase} {seed}")
    deadline = time.monotonic() + 150
    while not list(folder.glob(f"at-{phase}-*")):
        assert run.poll() is None and time.monotonic() < deadline, f"never came to {phase}"
        time.sleep(0.002)
    ranks = json.loads((folder / "run" / "ranks.json").read_text())["ranks"]
    pids = {entry["rank"]: entry["pid"] for entry in ranks}
    rank = draws.choice([rank for rank in sorted(pids) if servers or rank > 2])
    time.sleep(draws.uniform(0, LATEST_SECONDS))
    os.kill(pids[rank], signal.SIGKILL)
    return rank


@pytest.mark.drill
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", PROTECTIONS)
def test_a_rank_killed_from_outside_changes_no_file(name, phase, seed, tmp_path, calm):
    run = started(tmp_path, name)
    rank = kill_in(run, tmp_path, phase, name not in WITHOUT_SERVERS, seed)
    said, _ = run.communicate(timeout=200)
    if (run.returncode == 3 and "type --resume auto" in said) or "with --resume auto" in said:
        # a rollback behind the script's loop; the log gets the steps again
        (tmp_path / "log.csv").unlink()
        run = started(tmp_path, name, "--resume", "auto")
        said, _ = run.communicate(timeout=200)
        files = [file for file in FILES if file != "log.csv"]
    else:
        files = FILES
    assert run.returncode == 0, (rank, said)
    assert model_of(tmp_path) == model_of(calm), (rank, said)
    for file in files:
        assert (tmp_path / file).read_bytes() == (calm / file).read_bytes(), (file, rank, said)

"""Runs in which a rank fails without being killed."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from support.drilling import RUN_SECONDS, Run
from support.paths import PROGRAMS


def misbehaving(how: str) -> tuple[str, ...]:
    """`ecrm` in which a rank, by default 1, misbehaves so in step 30 (programs/misbehaving.py)."""
    return (str(PROGRAMS / "misbehaving.py"), how)


def started(
    folder: Path,
    data: Path,
    *sets: str,
    program: tuple[str, ...] = ("-m", "ecrm"),
    kills: tuple[str, ...] = (),
    process_group: int | None = None,
    cores: Path | None = None,
) -> subprocess.Popen:
    """`cores` is a folder for the core files of ranks that crash: their current one."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    words = [
        sys.executable,
        *program,
        "launch",
        "tiny",
        "--run-dir",
        str(folder),
        "--set",
        f"data.path={data}",
    ]
    for one in (
        "train.steps=400",
        "model.dense_arch=native",
        "protection.verify_parity_at_end=true",
        *sets,
    ):
        words += ["--set", one]
    for kill in kills:
        words += ["--kill", kill]
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=process_group,
        cwd=cores,
        preexec_fn=cores and (lambda: resource.setrlimit(resource.RLIMIT_CORE, unlimited)),
    )


def ranks_of(folder: Path) -> list[dict]:
    deadline = time.monotonic() + RUN_SECONDS
    while (
        not (folder / "events.jsonl").exists()
        or '"progress"' not in (folder / "events.jsonl").read_text()
    ):
        assert time.monotonic() < deadline, "training did not begin"
        time.sleep(0.05)
    return json.loads((folder / "ranks.json").read_text())["ranks"]


def ended(process: subprocess.Popen, folder: Path) -> Run:
    output, _ = process.communicate(timeout=RUN_SECONDS)
    return Run(process.returncode, output, folder)


def finished(process: subprocess.Popen, folder: Path) -> Run:
    """The run, which must be complete and its parity right."""
    run = ended(process, folder)
    assert run.code == 0, run.output
    assert run.summary["parity"]["stripes"] > 0, run.output
    assert run.summary["parity"]["mismatches"] == 0, run.output
    return run


HANG_SECONDS = 2.0
"""cluster.hang_seconds where nothing is said."""


def longest_gap(run: Run) -> float:
    """Seconds between two steps.

    A rank stopped inside the agreement on a commit holds up that step, and its death is noticed in
    another.
    """
    finished = sorted(when for event in run.events_of("progress") for _, when in event["finished"])
    return max(later - earlier for earlier, later in zip(finished, finished[1:]))

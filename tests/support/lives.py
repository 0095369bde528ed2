"""Lives of a run under `--resume auto`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ecrm.process.linux import session_members, shared_segments
from support.drilling import RUN_SECONDS, launch_words

HALF_WRITTEN = (".*", "checkpoints/.*")


def one_line(folder: Path, data: Path, sets: dict) -> list[str]:
    return [*launch_words(folder, data, sets), "--resume", "auto"]


def life(
    words: list[str],
    over: Callable[[float], bool] = lambda seconds: False,
    cwd: Path | None = None,
) -> tuple[int | None, str]:
    """Type the line, and SIGKILL everything as soon as it is `over`.

    Returns the exit code, None when it was killed, and what was printed.
    """
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=cwd,
    )
    began, code = time.monotonic(), None
    mpirun: set[int] = set()
    while (code := process.poll()) is None and not over(time.monotonic() - began):
        assert time.monotonic() - began < RUN_SECONDS
        time.sleep(0.002)
    with contextlib.suppress(OSError):
        mpirun.update(
            map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        )
    segments: set[str] = set()
    while left := [pid for leader in (process.pid, *mpirun) for pid in session_members(leader)]:
        for pid in left:
            segments |= shared_segments(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for segment in segments:
        Path(segment).unlink(missing_ok=True)
    return code, process.communicate()[0]


def half_written(folder: Path) -> list[str]:
    return [path.name for pattern in HALF_WRITTEN for path in folder.glob(pattern)]

"""Runs under a plain mpirun that are disturbed while they start."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from support.drilling import RUN_SECONDS, Mpirun, mpirun_line
from support.paths import PROGRAMS

WITHIN_SECONDS = 10.0
"""From a death to the end of mpirun.

1.5 s to be sure, half a second between looks, and a machine that is not idle.
"""


LATE = (str(PROGRAMS / "late.py"),)


class Start(Mpirun):
    """`mpirun ... ecrm train` on the tiny config, started and not waited for."""

    def __init__(
        self, folder: Path, data: Path, *sets: str, program: tuple[str, ...] = ("-m", "ecrm")
    ) -> None:
        line = mpirun_line(folder, data, dict(one.split("=") for one in sets))
        at = line.index("-m", line.index(sys.executable))
        super().__init__([*line[:at], *program, *line[at + 2 :]])
        self.folder = folder

    def ranks(self, rank: int) -> list[int]:
        """A rank's two processes: the one started by mpirun, which is the guard, and its child."""
        found = []
        for pid in self.members:
            try:
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if f"PMIX_RANK={rank}".encode() in words:
                found.append((parent != self.process.pid, pid))
        return [pid for _, pid in sorted(found)]

    def wait_for(self, instant: Callable[[list[int]], int | None]) -> int:
        """The process of rank 1 that `instant` picks, as soon as it picks one."""
        deadline = time.monotonic() + RUN_SECONDS
        while time.monotonic() < deadline:
            pid = instant(self.ranks(1))
            if pid is not None:
                return pid
        raise AssertionError("rank 1 did not come so far")


def first_process(pids: list[int]) -> int | None:
    return pids[0] if pids else None


def guard_process(pids: list[int]) -> int | None:
    return pids[0] if len(pids) > 1 else None


def guarded_process(pids: list[int]) -> int | None:
    return pids[1] if len(pids) > 1 else None


def ended_with_one_line(code: int, output: str, said: str) -> None:
    assert code == 3, output
    assert [line for line in output.splitlines() if "ecrm" in line or "Traceback" in line] == [
        f"ecrm: error: {said}"
    ]

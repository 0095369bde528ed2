"""Runs under a plain mpirun that are disturbed while they start."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ecrm.process.neighbours import RANK, PidNotes
from ecrm.process.orphaned import parent_of
from support.drilling import RUN_SECONDS, Mpirun, environ_of, mpirun_line
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
        """A rank's two processes: the one started by mpirun, which is the guard, and the rank."""
        for pid in self.members:
            with contextlib.suppress(OSError):
                environ = environ_of(pid)
                if parent_of(pid) == self.process.pid and environ.get(RANK) == str(rank):
                    note = PidNotes(environ).notes().get(rank)
                    return [pid, note.rank] if note and note.rank else [pid]
        return []

    def server(self) -> int | None:
        """The process from which ranks are forked, once torch is being loaded there."""
        for pid in self.members:
            with contextlib.suppress(OSError):
                is_child_of_guard = parent_of(parent_of(pid)) == self.process.pid
                if is_child_of_guard and has_mapped(pid, "libtorch_cpu"):
                    return pid
        return None

    def wait_for(self, instant: Callable[[list[int]], int | None]) -> int:
        """The process of rank 1 that `instant` picks, as soon as it picks one."""
        return self.wait(lambda: instant(self.ranks(1)))

    @staticmethod
    def wait(find: Callable[[], int | None]) -> int:
        """The process that `find` finds, as soon as it finds one."""
        deadline = time.monotonic() + RUN_SECONDS
        while time.monotonic() < deadline:
            if (pid := find()) is not None:
                return pid
        raise AssertionError("the start did not come so far")


def has_mapped(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()


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

"""Processes that look after each other, and kill those that stand stopped.

These are the guards of one host, and the clients of the head machine. A guard notices its own
rank's stop; nobody notices where the guard is stopped as well, as `pkill -STOP -f` does to both. So
every guard leaves a note in the job's folder, and kills a neighbour that stands still for too long.
Open MPI then tells all ranks of that death. The clients of ranks on other hosts
(ecrm/launch/remote_rank.py), which mpirun takes for ranks, do the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ecrm.process.preflight import JOB_FOLDER

JOB, RANK = "PMIX_NAMESPACE", "PMIX_RANK"
LOADED = "loaded-"


@dataclass(frozen=True)
class Note:
    """A guard's process, and when it began.

    When it `began` tells it from a later process with the same pid.
    """

    pid: int
    began: str


class Noticeboard:
    """The notes of a job's guards on this host, or of the processes that `who` says.

    Without a folder for the job there are none.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, who: str = "guards") -> None:
        self._folder = (
            Path(environ.get(JOB_FOLDER, "/nonexistent")) / f"ecrm-{who}-{environ.get(JOB, '')}"
        )

    def put(self, rank: int, pid: int) -> None:
        """Leave the note of a rank's guard."""
        # no such folder: no mpirun, or its daemon is not on this host
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            draft = self._folder / f".{rank}"
            draft.write_text(f"{pid} {_stat(pid)[1]}")
            draft.rename(self._folder / str(rank))

    def put_loaded(self, rank: int) -> None:
        """Leave word that a rank has loaded what it needs and comes to MPI now."""
        with contextlib.suppress(OSError):
            (self._folder / f"{LOADED}{rank}").touch()

    def loaded(self) -> int:
        """How many ranks of this host have left that word."""
        with contextlib.suppress(OSError):
            return sum(name.startswith(LOADED) for name in os.listdir(self._folder))
        return 0

    def notes(self) -> dict[int, Note]:
        """The notes left so far, by rank."""
        notes = {}
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                if name.isdigit():
                    pid, began = (self._folder / name).read_text().split()
                    notes[int(name)] = Note(int(pid), began)
        return notes

    def living(self) -> set[int]:
        """The ranks of notes whose processes are there."""
        return {
            rank
            for rank, note in self.notes().items()
            if (stat := _stat(note.pid))[1] == note.began and stat[0] not in ("Z", "X")
        }


class AwakeClock:
    """Seconds that this process was awake, where it looks at the clock all the time.

    Of a time in which it stood stopped itself, at most `longest` seconds count. So of processes
    that were stopped together none is taken for hung when another is continued first.
    """

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest, self._clock = longest, clock
        self._passed, self._last = 0.0, clock()

    def __call__(self) -> float:
        now = self._clock()
        self._passed += min(now - self._last, self._longest)
        self._last = now
        return self._passed


class Standing:
    """For how long processes have stood stopped, as far as one who looks now and then can know."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._still: dict[int, tuple[str, float]] = {}

    def seconds(self, pid: int) -> float:
        """Seconds since the first look that found it stopped, if it has not run since.

        0 for a process that is not stopped, or not there.
        """
        now = self._clock()
        if _stat(pid)[0] != "T":
            return 0.0
        turns = _turns(pid)
        before, since = self._still.get(pid, ("", now))
        self._still[pid] = (turns, since if turns == before else now)
        return now - self._still[pid][1]


class Neighbours:
    """Kills guards of this host that have stood stopped for `hang_seconds`.

    `who` names other processes than guards. Call `look()` now and then.
    """

    def __init__(
        self,
        hang_seconds: float,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        kill: Callable[[int, int], None] = os.kill,
        who: str = "guards",
    ) -> None:
        self._hang_seconds, self._kill = hang_seconds, kill
        self._rank = int(environ.get(RANK, 0))
        self._noticeboard = Noticeboard(environ, who)
        self._notes: dict[int, Note] = {}
        self._standing = Standing(clock)

    def look(self) -> None:
        """Look at the others, and kill those that have stood stopped for too long.

        The time of a guard that has run in between, however shortly, starts anew. One that has
        ended is left alone. Goes round the ranks from this one's on as far as a guard that runs,
        which looks after those behind it.
        """
        if not self._notes:  # once MPI is up all have left theirs
            self._notes = self._noticeboard.notes()
        for rank in sorted(self._notes, key=lambda rank: (rank <= self._rank, rank)):
            note = self._notes[rank]
            letter, began = _stat(note.pid)
            if rank == self._rank or began != note.began or letter in ("Z", "X"):
                continue
            if letter != "T":
                return
            if self._standing.seconds(note.pid) >= self._hang_seconds:
                for pid in (*_children(note.pid), note.pid):
                    with contextlib.suppress(OSError):
                        self._kill(pid, signal.SIGKILL)


def _stat(pid: int) -> tuple[str, str]:
    """A process's state and when it began, in ticks since the start of this machine.

    Both are empty if the process is not there.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _turns(pid: int) -> str:
    """How often a process has given up a CPU, in words to compare.

    It stays the same for a process that was stopped all the time between two looks.
    """
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return " ".join(line.split()[1] for line in lines if "ctxt_switches" in line)
    return ""


def _children(pid: int) -> list[int]:
    """The child processes of a guard or a client.

    That is the guard's rank, which does not die with the guard once it was asked to stop, or the
    client's starter.
    """
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []

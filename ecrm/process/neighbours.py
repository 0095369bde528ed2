"""Processes that watch their neighbours, and kill neighbours that stay stopped.

Such processes are the guards of a host. A guard notices a stop of its own rank; no guard would
notice a stop of the guard itself as well, as by `pkill -STOP -f`. Every guard therefore leaves a
note in the job's folder, and kills a neighbour that stays stopped for too long. Open MPI then tells
all ranks of the death.
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
FIRST = "first-to-leave"


@dataclass(frozen=True)
class Note:
    """A guard's process, and its start time.

    `began` tells the process from a later process with the same pid. `rank` is the pid of the
    process under guard, 0 before its birth.
    """

    pid: int
    began: str
    rank: int = 0


class PidNotes:
    """The notes of a job's guards on this host.

    Without a folder for the job there are no notes.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        # of this host: hosts may have the folder in common
        name = f"ecrm-guards-{environ.get(JOB, '')}-{os.uname().nodename}"
        self._folder = Path(environ.get(JOB_FOLDER, "/nonexistent")) / name

    def put(self, rank: int, pid: int, of_rank: int = 0) -> None:
        """Leave the note of a rank's guard; `of_rank` is the pid of the rank, 0 if not known."""
        # without a folder: no mpirun, or mpirun's daemon is not on this host
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            draft = self._folder / f".{rank}"
            draft.write_text(f"{pid} {_stat(pid)[1]} {of_rank}")
            draft.rename(self._folder / str(rank))

    def put_loaded(self, rank: int) -> None:
        """Leave word that a rank has loaded torch and starts MPI next."""
        with contextlib.suppress(OSError):
            (self._folder / f"{LOADED}{rank}").touch()

    def loaded(self) -> int:
        """The number of ranks of this host with word from `put_loaded`."""
        with contextlib.suppress(OSError):
            return sum(name.startswith(LOADED) for name in os.listdir(self._folder))
        return 0

    def notes(self) -> dict[int, Note]:
        """The notes left until now, by rank."""
        notes = {}
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                if name.isdigit():
                    pid, began, of_rank = (self._folder / name).read_text().split()
                    notes[int(name)] = Note(int(pid), began, int(of_rank))
        return notes

    def is_first_to_leave(self) -> bool:
        """Whether this call is the first of all guards of this host; `True` without a folder."""
        with contextlib.suppress(OSError):
            try:
                (self._folder / FIRST).touch(exist_ok=False)
            except FileExistsError:
                return False
        return True

    def living(self) -> set[int]:
        """The ranks with a note and a living process."""
        return {
            rank
            for rank, note in self.notes().items()
            if (stat := _stat(note.pid))[1] == note.began and stat[0] not in ("Z", "X")
        }

    def await_ranks(self, seconds: float) -> None:
        """Wait at most `seconds` until no rank of this host runs; stopped ranks are not awaited.

        A rank without a living guard is dying, and not awaited either.
        """
        deadline, pause = time.monotonic() + seconds, 0.01
        notes = self.notes().values()
        while time.monotonic() < deadline and any(
            note.rank
            and _stat(note.pid)[1] == note.began
            and _stat(note.rank)[0] not in ("", "Z", "X", "T")
            for note in notes
        ):
            time.sleep(pause)
            pause = min(2 * pause, 0.2)


class AwakeClock:
    """Seconds this process was awake, if the process calls the clock all the time.

    Of a time between two calls, at most `longest` seconds count, however long this process was
    stopped. After a common stop of several processes, the first process to run again then takes no
    other process for hung.
    """

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest, self._clock = longest, clock
        self._passed, self._last = 0.0, clock()

    def __call__(self) -> float:
        now = self._clock()
        self._passed += min(now - self._last, self._longest)
        self._last = now
        return self._passed


class StoppedTimer:
    """Times for which processes have been stopped, as seen in occasional looks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._still: dict[int, tuple[str, float]] = {}

    def seconds(self, pid: int) -> float:
        """Seconds since a process was first found stopped, if the process has not run since.

        0 for a process not stopped, or missing.
        """
        now = self._clock()
        if _stat(pid)[0] != "T":
            return 0.0
        turns = _turns(pid)
        before, since = self._still.get(pid, ("", now))
        self._still[pid] = (turns, since if turns == before else now)
        return now - self._still[pid][1]


class Neighbours:
    """Kills guards of this host that have been stopped for `hang_seconds`.

    Call `look()` now and then.
    """

    def __init__(
        self,
        hang_seconds: float,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        kill: Callable[[int, int], None] = os.kill,
    ) -> None:
        self._hang_seconds, self._kill = hang_seconds, kill
        self._rank = int(environ.get(RANK, 0))
        self._noticeboard = PidNotes(environ)
        self._notes: dict[int, Note] = {}
        self._standing = StoppedTimer(clock)

    def look(self) -> None:
        """Look at the neighbours, and kill neighbours stopped for too long.

        The time of a guard that has run in between, however shortly, starts anew. An ended guard is
        left alone. Goes round the ranks from this rank on, up to the first running guard, which
        watches the guards behind.
        """
        if not self._notes:  # once MPI is up every guard has left its note
            self._notes = self._noticeboard.notes()
        for rank in sorted(self._notes, key=lambda rank: (rank <= self._rank, rank)):
            note = self._notes[rank]
            letter, began = _stat(note.pid)
            if rank == self._rank or began != note.began or letter in ("Z", "X"):
                continue
            if letter != "T":
                return
            if self._standing.seconds(note.pid) >= self._hang_seconds:
                others = [note.rank] if note.rank else _children(note.pid)
                for pid in (*others, note.pid):
                    with contextlib.suppress(OSError):
                        self._kill(pid, signal.SIGKILL)


def _stat(pid: int) -> tuple[str, str]:
    """A process's state and start time, in ticks since the start of this machine.

    The state and the time are empty for a missing process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _turns(pid: int) -> str:
    """How often a process has given up a CPU, as text to compare.

    The text stays the same for a process stopped all the time between two looks.
    """
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return " ".join(line.split()[1] for line in lines if "ctxt_switches" in line)
    return ""


def _children(pid: int) -> list[int]:
    """The child processes of a client: its starter."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []

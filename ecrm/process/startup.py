"""The time before MPI is up, in which nobody but the guards notices a death.

A rank that dies before or inside MPI_Init leaves the others waiting there for ever, and mpirun with
them (measured, Open MPI 5.0.11: killed or exited, with any code). So until MPI is up in its own
rank, the guard of each rank looks after the others of this host, by the notes that they have left
(`ecrm.process.neighbours`). Once MPI_Init has returned in one rank, all have come to its end, and
MPI reports deaths itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ecrm.base.console import AGAIN, PATIENCE_SECONDS, so_far
from ecrm.process.neighbours import JOB, RANK, Noticeboard
from ecrm.process.preflight import SIZE

LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
THE_START = "the start"
"""What all messages of this time are about, so that each host prints one of them."""

GONE_SECONDS = 1.5
"""How long a rank must be away to count as dead.

mpirun forks one after the other, and a rank that has come through MPI_Init may die before this one
has come through too.
"""


class Startup:
    """One guard's view of the start: `trouble()` now and then until MPI is up in its rank."""

    def __init__(
        self,
        start_seconds: float,
        hang_seconds: float,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start_seconds, self._hang_seconds, self._clock = start_seconds, hang_seconds, clock
        self.rank = int(environ.get(RANK, 0))
        self._began = clock()
        self._job = environ.get(JOB, "")
        self._here = int(environ.get(LOCAL_SIZE, 1))
        self._known = (
            set(range(self._here)) if environ.get(SIZE) == environ.get(LOCAL_SIZE) else {self.rank}
        )
        self._since: dict[int, tuple[str, float]] = {}
        self._processes: dict[int, int] = {}
        self._noticeboard = Noticeboard(environ)
        self._noticeboard.put(self.rank, os.getpid())
        self._has_torch = False
        self._of_all = "" if environ.get(SIZE) == environ.get(LOCAL_SIZE) else " of this host"
        self._wait, self._wait_began, self._tell_after = "", self._began, PATIENCE_SECONDS

    def loaded(self) -> None:
        """This rank has torch, and comes to MPI now."""
        if not self._has_torch:
            self._has_torch = True
            self._noticeboard.put_loaded(self.rank)

    def news(self) -> str | None:
        """A line about what all wait for, of the guard of rank 0, where that takes long."""
        if self.rank != 0:
            return None
        seen, loaded, now = (
            bool(self._noticeboard.notes()),
            self._noticeboard.loaded(),
            self._clock(),
        )
        torch_is_there = loaded == self._here if seen else self._has_torch
        wait = "MPI comes up" if torch_is_there else "torch is loaded"
        if wait != self._wait:
            self._wait, self._wait_began, self._tell_after = wait, now, PATIENCE_SECONDS
        waited = now - self._wait_began
        if waited < self._tell_after:
            return None
        self._tell_after *= AGAIN
        count = f", {loaded} of {self._here} ranks{self._of_all} have it" if seen else ""
        return so_far(wait if torch_is_there else wait + count, waited)

    def trouble(self) -> str | None:
        """Why this start cannot succeed any more, None while it may."""
        now = self._clock()
        for rank, state in sorted(self._states().items()):
            before, since = self._since.get(rank, ("", now))
            self._since[rank] = (state, since if state == before else now)
            if state == "gone" and now - self._since[rank][1] >= GONE_SECONDS:
                return died(rank)
            if state == "stopped" and now - self._since[rank][1] >= self._hang_seconds:
                return (
                    f"rank {rank} was stopped before MPI was up, and is killed: start the run again"
                )
        if now - self._began >= self._start_seconds:
            return (
                f"MPI was not up after {self._start_seconds:g} s (cluster.start_seconds): "
                "start the run again"
            )
        return None

    def kill_strays(self) -> None:
        """SIGKILL ranks of this host that are stopped or have no guard.

        Nobody else would end them.
        """
        notes = self._noted()
        for rank, pid in self._processes.items():
            if rank != self.rank and (
                rank not in notes or self._since.get(rank, ("",))[0] == "stopped"
            ):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _states(self) -> dict[int, str]:
        """Every known rank of this host but this one: there, stopped or gone."""
        notes = self._noted()
        if not notes:
            return {}
        found = _ranks_running(self._job) if len(notes) < self._here else {}
        self._processes = {**found, **notes}
        self._known.update(self._processes)
        return {
            rank: _state(self._processes.get(rank)) for rank in self._known if rank != self.rank
        }

    def _noted(self) -> dict[int, int]:
        """Pids of the guards that have left a note, by rank."""
        return {rank: note.pid for rank, note in self._noticeboard.notes().items()}


def died(rank: int) -> str:
    """What there is to say about a death in this time."""
    return f"rank {rank} died before MPI was up: start the run again"


def _state(pid: int | None) -> str:
    """there, stopped or gone."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(letter, "there")


def _ranks_running(job: str) -> dict[int, int]:
    """{rank: pid} of this host's processes that mpirun has started as ranks of a job.

    They are found by their environment.
    """
    ranks: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{JOB}={job}".encode() in words:
                rank = next((word for word in words if word.startswith(f"{RANK}=".encode())), None)
                if rank is not None and _state(int(entry)) != "gone":
                    ranks.setdefault(int(rank.partition(b"=")[2]), int(entry))
    return ranks

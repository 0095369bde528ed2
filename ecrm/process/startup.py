"""The time before MPI is up, with deaths noticed by the guards only.

If a rank dies before or inside MPI_Init, the others wait in MPI_Init for ever, and mpirun with them
(measured, Open MPI 5.0.11: killed or exited, with any code). Until MPI is up in its own rank, a
guard therefore watches the ranks of this host, by the notes of their guards
(`ecrm.process.neighbours`). Once MPI_Init has returned in a rank, all ranks have reached the end of
MPI_Init, and MPI reports deaths itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ecrm.base.console import AGAIN, PATIENCE_SECONDS, so_far
from ecrm.process.neighbours import JOB, RANK, PidNotes
from ecrm.process.preflight import HOST, SIZE

LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
THE_START = "the start"
"""The subject of all messages of the start: every host prints a single such message."""

GONE_SECONDS = 1.5
"""Time for which a rank must be away to count as dead.

mpirun forks ranks in sequence, and a rank past MPI_Init may die before this rank is past MPI_Init.
"""


class Startup:
    """A guard's view of the start: call `trouble()` now and then until MPI is up in the rank."""

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
        # mpirun takes all ranks of --hosts for ranks of its own host. A rank beside mpirun has the
        # folder of the notes, and must not miss notes of ranks on other hosts there.
        self._noticeboard = PidNotes({} if HOST in environ else environ)
        self._noticeboard.put(self.rank, os.getpid())
        self._has_torch = False
        self._of_all = "" if environ.get(SIZE) == environ.get(LOCAL_SIZE) else " of this host"
        self._wait, self._wait_began, self._tell_after = "", self._began, PATIENCE_SECONDS

    def born(self, pid: int) -> None:
        """Note the process of this rank."""
        self._noticeboard.put(self.rank, os.getpid(), pid)

    def loaded(self) -> None:
        """Note that this rank has torch, and starts MPI next."""
        if not self._has_torch:
            self._has_torch = True
            self._noticeboard.put_loaded(self.rank)

    def news(self) -> str | None:
        """A line of rank 0's guard about the awaited event, if the wait is long, else `None`."""
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
        """Why this start cannot succeed any more; `None` while the start may succeed."""
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

        No other process would end the ranks.
        """
        notes = self._noted()
        for rank, pid in self._processes.items():
            if rank != self.rank and (
                rank not in notes or self._since.get(rank, ("",))[0] == "stopped"
            ):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _states(self) -> dict[int, str]:
        """The state of every other known rank of this host: there, stopped or gone."""
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
        """Pids of the guards with a note, by rank."""
        return {rank: note.pid for rank, note in self._noticeboard.notes().items()}


NO_TORCH = "the process that loads torch died before MPI was up: start the run again"


def died(rank: int) -> str:
    """The message about a death during the start."""
    return (
        f"rank {rank} died before MPI was up: correct the error that the rank has printed above; "
        "if there is no such error, start the run again"
    )


def _state(pid: int | None, parent: int | None = None) -> str:
    """The state of a process: there, stopped or gone; gone for a child of another `parent`."""
    try:
        letter, its = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "gone"
    if parent not in (None, int(its)):
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(letter, "there")


def _ranks_running(job: str) -> dict[int, int]:
    """{rank: pid} of the processes of a job started by the launcher of this host.

    A process is a guard, or a program that a user has put between the launcher and the guard. The
    processes are found by their environment. A rank forked from a fork server has the environment
    of another rank's guard.
    """
    ranks: dict[int, int] = {}
    launcher = _launcher(job)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            rank = _rank_of(entry, job)
            if rank is not None and _state(int(entry), launcher) != "gone":
                ranks.setdefault(rank, int(entry))
    return ranks


def _launcher(job: str) -> int:
    """The nearest ancestor of this process that is no process of the job."""
    pid = os.getppid()
    while _rank_of(pid, job) is not None:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # the launcher is gone, and this guard ends soon
            return os.getppid()
    return pid


def _rank_of(pid: int | str, job: str) -> int | None:
    """The rank in the environment of a process; `None` for a process outside of the job."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    if f"{JOB}={job}".encode() not in words:
        return None
    rank = next((word for word in words if word.startswith(f"{RANK}=".encode())), None)
    return None if rank is None else int(rank.partition(b"=")[2])

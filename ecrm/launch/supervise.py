"""Run mpirun to a certain end, with all its processes, no matter which process dies.

mpirun is started as the leader of its own session. Ranks leave mpirun's process group but not the
session. The session is thus the set of processes to look after, even after a kill of mpirun itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ecrm.launch.environment import SESSION_BASE, mpirun_environment
from ecrm.launch.watch import Watch
from ecrm.process.linux import session_members, shared_segments, when_parent_ends
from ecrm.run.reading import LAUNCH, read_own
from ecrm.run.session_folders import has_ended

STOP_SECONDS = 10.0

# mpirun hands SIGUSR1 and SIGUSR2 on to the ranks, on all hosts, and waits for the ranks (the guard
# of a rank knows both meanings). After SIGINT, SIGTERM or SIGHUP mpirun SIGKILLs the ranks within
# 0.5 s and has no option to wait longer (measured, Open MPI 5.0.11).
ASKS_RANKS = {
    signal.SIGINT: signal.SIGUSR1,
    signal.SIGTERM: signal.SIGUSR2,
    signal.SIGHUP: signal.SIGUSR2,
}

# from the run's own last file to SIGKILL: mpirun may wait for ever for a stopped rank
LINGER_SECONDS = 20.0
# mpirun without a process of its own may wait for ever for itself (seen once, at the start)
RANKLESS_SECONDS = 20.0
POLL_SECONDS = 0.1
KILL_SECONDS = 5.0


@dataclass(frozen=True)
class MpirunEnding:
    """How mpirun ended.

    `exit_code` is negative if mpirun died of a signal. `stopped_by` is the signal that stopped the
    launch, and `launch` the name of the launch. `gave_up` is the reason for killing an mpirun
    without ranks, else "".
    """

    exit_code: int
    stopped_by: signal.Signals | None
    launch: str | None = None
    gave_up: str = ""


def supervise(
    line: Sequence[str],
    run_dir: Path,
    stop_seconds: float | None = None,
    launch: str | None = None,
    watch: Watch | None = None,
    ranks_here: bool = True,
    variables: Mapping[str, str] | None = None,
) -> MpirunEnding:
    """Run `line` to its end; on return none of its processes is left.

    `launch` is the name of the launch: files of other launches in `run_dir` count for nothing, and
    ranks named in such files are left alone. `watch` observes the run, by default for no follower.
    `ranks_here`: all ranks are on this machine, and an mpirun without any rank for long is killed.
    `variables` are further variables of the environment of all ranks.

    SIGINT, SIGTERM or SIGHUP asks the ranks to stop within `stop_seconds`, by default STOP_SECONDS.
    After the last file of the run mpirun has a bounded time to leave; a second signal ends mpirun
    at once.
    """
    signals: list[signal.Signals] = []
    name = {} if launch is None else {LAUNCH: launch}
    watch = Watch(run_dir) if watch is None else watch
    with _collected(signals), session_base() as base:
        process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**mpirun_environment(os.environ)[0], **base, **name, **(variables or {})},
            # In case this process is SIGKILLed. Linux sends the signal once per thread of this
            # process, and mpirun leaves its ranks alone at the second; the guards of the ranks see
            # mpirun go and end the ranks.
            preexec_fn=lambda: when_parent_ends(signal.SIGTERM),
            **watch.streams,
        )
        try:
            watch.began(process, launch)
            patience = STOP_SECONDS if stop_seconds is None else stop_seconds
            ranks = _Ranks(process.pid) if ranks_here else None
            gave_up = _wait(process, run_dir, signals, patience, launch, watch, ranks)
        finally:
            _kill_all(process, run_dir, launch)
            watch.ended()
    # None if mpirun outlived its SIGKILL, in a system call without a return.
    code = -signal.SIGKILL if process.returncode is None else process.returncode
    return MpirunEnding(code, signals[0] if signals else None, launch, gave_up)


class _Ranks:
    """Looks now and then for processes of an mpirun; `gone()` after a long time without any."""

    def __init__(self, mpirun: int) -> None:
        self._mpirun, self._since, self._looked = mpirun, time.monotonic(), time.monotonic()

    def gone(self) -> bool:
        now = time.monotonic()
        if now - self._looked >= 1.0:
            self._looked = now
            if any(pid != self._mpirun for pid in session_members(self._mpirun)):
                self._since = now
        return now - self._since >= RANKLESS_SECONDS


@contextlib.contextmanager
def session_base() -> Iterator[dict[str, str]]:
    """Variables giving mpirun a folder of its own for its session files, removed afterwards.

    In a shared folder the files are named after mpirun's pid alone, and files left by a killed
    mpirun keep a later mpirun with the same pid from starting ("The PMIx server's listener thread
    failed to start").
    """
    if SESSION_BASE in os.environ:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="ecrm-", ignore_cleanup_errors=True) as folder:
        yield {SESSION_BASE: folder}


def _wait(
    process: subprocess.Popen[str],
    run_dir: Path,
    signals: list[signal.Signals],
    stop_seconds: float,
    launch: str | None,
    watch: Watch,
    ranks: _Ranks | None,
) -> str:
    """Return when mpirun has ended or used up its time; the reason to give mpirun up, else ""."""
    forwarded = False
    deadline = float("inf")
    while process.poll() is None and time.monotonic() < deadline:
        if signals and not forwarded:
            process.send_signal(ASKS_RANKS[signals[0]])
            forwarded, deadline = True, time.monotonic() + stop_seconds
        elif len(signals) > 1:
            return ""
        if ranks is not None and ranks.gone():
            return f"mpirun had no rank for {RANKLESS_SECONDS:g} s, and was killed: start it again"
        if deadline == float("inf") and has_ended(run_dir, launch):
            deadline = time.monotonic() + LINGER_SECONDS
        watch.look(stopping=forwarded)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
    return ""


def _kill_all(process: subprocess.Popen[str], run_dir: Path, launch: str | None) -> None:
    """SIGKILL all processes left of mpirun, of its session, and of this host's ranks in ranks.json.

    Unlinks the shared-memory files mapped by the killed processes: with mpirun dead no process
    would, and each file holds 16 MiB of memory.
    """
    deadline = time.monotonic() + KILL_SECONDS
    segments: set[str] = set()
    while True:
        left = [*session_members(process.pid), *_ranks_alive(run_dir, launch)]
        for pid in left:
            segments.update(shared_segments(pid))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.poll()  # reaps mpirun
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for segment in segments:
        with contextlib.suppress(OSError):
            os.unlink(segment)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)


def _ranks_alive(run_dir: Path, launch: str | None) -> list[int]:
    """Pids in ranks.json of processes still running as ranks of this run on this host.

    A pid reused by a different program does not count.
    """
    alive = []
    for entry in read_own(run_dir / "ranks.json", launch).get("ranks", []):
        pid = entry.get("pid")
        if entry.get("host") == socket.gethostname() and isinstance(pid, int):
            with contextlib.suppress(OSError):
                if os.fsencode(run_dir) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    alive.append(pid)
    return alive


@contextlib.contextmanager
def _collected(signals: list[signal.Signals]) -> Iterator[None]:
    """Append SIGINT, SIGTERM and SIGHUP to `signals` instead of acting on the signals."""
    before = {
        number: signal.signal(number, lambda received, _: signals.append(signal.Signals(received)))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

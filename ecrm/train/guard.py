"""A guard process around each rank that turns every way of dying into the one that MPI reports: SIGKILL.

ULFM learns within milliseconds of a process killed by a signal, but never of one that exits by itself,
throws or is stopped (measured, Open MPI 5.0.11). So the process that mpirun started stays behind as a
guard of a few megabytes and the rank runs as its child: when the child goes without having said that it
is done, or stands stopped for too long, the guard kills it and then itself, which mpirun tells everybody.
It also keeps a fenced rank from ever coming back, and ends the rank when mpirun is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import NoReturn

PR_SET_PDEATHSIG = 1
_PASSED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGINT,
    signal.SIGUSR2: signal.SIGTERM,
}
"""What the rank gets for what the guard gets. mpirun hands SIGUSR1 and SIGUSR2 on and waits; after the others it kills."""

_WATCHED = {signal.SIGCHLD, *_PASSED_ON}
_POLL_SECONDS = 0.5


class Guarded:
    """The guarded rank's side: `done()` just before it leaves on purpose."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def done(self) -> None:
        """From now on this process may exit, with any code, without being taken for dead."""
        with contextlib.suppress(BrokenPipeError):  # mpirun has killed the guard: nobody is left to be told
            os.write(self._descriptor, b"d")


def hold_signals() -> None:
    """Let what a guard waits for wait for the guard: a request to stop that comes too early is not lost, nor kills."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)


def guard(hang_seconds: float) -> Guarded:
    """Fork: returns in the child, which goes on as the rank; the guard itself never returns.

    A child stopped (SIGSTOP) for `hang_seconds` is killed. Call before threads exist and before MPI starts.
    """
    reading, writing = os.pipe()
    mpirun = os.getppid()
    hold_signals()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == mpirun or os.getppid() == 1:
            os._exit(1)  # the guard died before the line above
        os.setpgid(0, 0)  # mpirun signals groups: it is the guard that hears it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        os.close(reading)
        return Guarded(writing)
    os.close(writing)
    os.set_blocking(reading, False)
    _watch(child, reading, mpirun, hang_seconds)


def _watch(child: int, reading: int, mpirun: int, hang_seconds: float) -> NoReturn:
    stopped_since: float | None = None
    while True:
        caught = signal.sigtimedwait(_WATCHED, min(_POLL_SECONDS, hang_seconds / 4))
        if caught is not None and caught.si_signo != signal.SIGCHLD:
            os.kill(child, _PASSED_ON[signal.Signals(caught.si_signo)])
        while True:
            pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                stopped_since = time.monotonic()
            elif os.WIFCONTINUED(status):
                stopped_since = None
            else:
                _leave(status, _said_done(reading))
        if os.getppid() != mpirun or (stopped_since is not None and time.monotonic() - stopped_since > hang_seconds):
            os.kill(child, signal.SIGKILL)


def _said_done(reading: int) -> bool:
    try:
        return os.read(reading, 1) == b"d"
    except BlockingIOError:  # a process that the rank has forked lives on
        return False


def _leave(status: int, done: bool) -> NoReturn:
    """End as the child did if it was done, else so that everybody notices."""
    if done and os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")

"""SIGINT and SIGTERM ask to stop: the rank notes the request, all ranks stop at the next commit.

Python's handler in C writes the number of a signal into a pipe at once, whatever the main thread is
doing, and a thread reads the pipe. A handler in Python alone would run only after the main thread's
present MPI call. No signal is blocked: processes started by a script would inherit the block, and
SIGTERM could not stop the processes. A handler set by a script runs, too.

A rank dies with its guard, but a rank asked to stop outlives its guard: Open MPI 5.0.11 SIGKILLs
its children 0.25 s after SIGTERM, and has no option for a longer time (measured).
`ecrm.process.orphaned` has the other means to go on without mpirun.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time

from ecrm.process import orphaned
from ecrm.process.fork_server import Tether
from ecrm.process.guard import MPIRUN_GOES

REQUESTS = {signal.SIGINT, signal.SIGTERM, MPIRUN_GOES}
LEAVE_SECONDS = 20
"""Time for which a rank asked to stop may go on without its guard or mpirun.

Then the rank ends, stopped or not. With guard and mpirun there is no limit.
"""

_POLL_SECONDS = 0.1


class StopSignals:
    """Remembers a signal asking this rank to stop; to be made before other threads exist.

    `guard` is the pid of the guard, and `tether` ends this rank with the guard until a request.

    `received` is the first SIGINT or SIGTERM, `None` before; SIGTERM also stands for a first
    MPIRUN_GOES. `orphaned` is whether mpirun got the signal itself, and is soon gone.
    """

    def __init__(self, guard: int, tether: Tether) -> None:
        self.received: signal.Signals | None = None
        self.orphaned = False
        self._guard, self._tether = guard, tether
        self._pipe, writing = os.pipe()
        os.set_blocking(writing, False)
        _writing.append(writing)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in REQUESTS:
            signal.signal(number, _came)
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS),
            after_in_parent=_unblock,
            after_in_child=_as_without,
        )
        threading.Thread(target=self._watch, name="stop signals", daemon=True).start()

    def _watch(self) -> None:
        came = self._next(wait=True)
        self._tether.untie()
        if MPIRUN_GOES in came:
            self._become_orphaned()
        self.received = next((number for number in came if number != MPIRUN_GOES), signal.SIGTERM)
        while not self.orphaned and not self._tether.is_broken:
            if MPIRUN_GOES in self._next(wait=False):
                self._become_orphaned()
            time.sleep(_POLL_SECONDS)
        signal.alarm(LEAVE_SECONDS)

    def _next(self, wait: bool) -> list[signal.Signals]:
        """The requests not returned before; with `wait`, at least one request."""
        while True:
            came = select.select([self._pipe], [], [], None if wait else 0)[0]
            numbers = os.read(self._pipe, 64) if came else b""
            asked = [signal.Signals(number) for number in numbers if number in REQUESTS]
            if asked or not wait:
                return asked

    def _become_orphaned(self) -> None:
        self.orphaned = True
        signal.alarm(LEAVE_SECONDS)
        with contextlib.suppress(OSError):
            orphaned.keep_connection()
        with contextlib.suppress(OSError):
            orphaned.speak_for(orphaned.parent_of(self._guard))


_writing: list[int] = []
"""The pipe's writing end, for the handler."""


def _came(number: int, _: object) -> None:
    """Write the number into the pipe again, in case a script has taken the wakeup.

    asyncio takes the wakeup, in `add_signal_handler`.
    """
    with contextlib.suppress(OSError):
        os.write(_writing[0], bytes([number]))


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)


def _as_without() -> None:
    """In a forked process: restore Python's usual handling of signals.

    No signal has reached this process before: the pipe's numbers are the parent's.
    """
    signal.set_wakeup_fd(-1)
    for number in REQUESTS:
        if signal.getsignal(number) is _came:
            default = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if default else signal.SIG_DFL)
    _unblock()

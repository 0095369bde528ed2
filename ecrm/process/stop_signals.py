"""SIGINT and SIGTERM ask to stop: the rank remembers it, and all ranks stop at the next commit.

Python's handler in C writes each signal's number into a pipe at once, whatever the main thread is
in, and a thread reads the pipe. A handler of Python's alone would run only when the main thread is
back from the MPI call that it is in. No signal is blocked: processes that a script starts would
inherit that, and could not be stopped by SIGTERM. A handler that a script sets runs, too.

The thread is also the one that dies with the guard. A rank that has been asked to stop outlives its
guard: Open MPI 5.0.11 SIGKILLs what it has started 0.25 s after SIGTERM, for which it has no option
(measured). What else it takes to go on without mpirun is in `ecrm.process.orphaned`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time

from ecrm.process import orphaned
from ecrm.process.guard import MPIRUN_GOES
from ecrm.process.linux import when_parent_ends

REQUESTS = {signal.SIGINT, signal.SIGTERM, MPIRUN_GOES}
LEAVE_SECONDS = 20
"""How long a rank that was asked to stop may go on without its guard or mpirun.

Then it ends, stopped or not. With both there is no limit.
"""

_POLL_SECONDS = 0.1


class StopSignals:
    """Remembers a signal that asks this rank to stop; make it before other threads exist.

    `received` is the first of SIGINT and SIGTERM that came, None before. `alone` is whether
    mpirun has got the signal itself, and is gone soon.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.orphaned = False
        self._guard = os.getppid()
        self._watching = threading.Event()
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
        self._watching.wait()
        when_parent_ends(0)  # of the main thread; the other thread has it now

    def _watch(self) -> None:
        when_parent_ends(signal.SIGKILL)
        self._watching.set()
        came = self._next(wait=True)
        when_parent_ends(0)
        if MPIRUN_GOES in came:
            self._become_orphaned()
        self.received = next((number for number in came if number != MPIRUN_GOES), signal.SIGTERM)
        while not self.orphaned and os.getppid() == self._guard:
            if MPIRUN_GOES in self._next(wait=False):
                self._become_orphaned()
            time.sleep(_POLL_SECONDS)
        signal.alarm(LEAVE_SECONDS)

    def _next(self, wait: bool) -> list[signal.Signals]:
        """The requests that have come and were not given yet; with `wait`, at least one."""
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
"""The pipe's end, for the handler."""


def _came(number: int, _: object) -> None:
    """Write the number into the pipe: it is there by now, unless a script has taken the wakeup.

    asyncio does that, in `add_signal_handler`.
    """
    with contextlib.suppress(OSError):
        os.write(_writing[0], bytes([number]))


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)


def _as_without() -> None:
    """In a process that was forked: signals do what they do in any process of Python.

    None came until now: the pipe is that of the process that has forked.
    """
    signal.set_wakeup_fd(-1)
    for number in REQUESTS:
        if signal.getsignal(number) is _came:
            default = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if default else signal.SIG_DFL)
    _unblock()

"""SIGINT and SIGTERM ask to stop: the rank remembers it, and all ranks stop at the next commit.

Signals wait for a thread of their own. A handler of Python's would run only when the main thread is
back from the MPI call that it is in; this thread runs meanwhile, since those calls hold no lock. It
is also the one that dies with the guard: a rank that has been asked to stop outlives its guard,
because Open MPI 5.0.11 SIGKILLs what it has started 0.25 s after SIGTERM, for which it has no
option (measured); what else it takes to go on without mpirun is in `ecrm.process.orphaned`.
"""

from __future__ import annotations

import contextlib
import os
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
        signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
        threading.Thread(target=self._watch, name="stop signals", daemon=True).start()
        self._watching.wait()
        when_parent_ends(0)  # of the main thread; the other thread has it now

    def _watch(self) -> None:
        when_parent_ends(signal.SIGKILL)
        self._watching.set()
        number = signal.Signals(signal.sigwait(REQUESTS))
        when_parent_ends(0)
        if number == MPIRUN_GOES:
            self._become_orphaned()
            number = signal.SIGTERM
        self.received = number
        while not self.orphaned and os.getppid() == self._guard:
            if MPIRUN_GOES in signal.sigpending():
                self._become_orphaned()
            time.sleep(_POLL_SECONDS)
        signal.alarm(LEAVE_SECONDS)

    def _become_orphaned(self) -> None:
        self.orphaned = True
        signal.alarm(LEAVE_SECONDS)
        with contextlib.suppress(OSError):
            orphaned.keep_connection()
        with contextlib.suppress(OSError):
            orphaned.speak_for(orphaned.parent_of(self._guard))

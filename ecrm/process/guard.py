"""A guard process beside each rank turns every way of dying into SIGKILL, which MPI reports.

ULFM learns within milliseconds of a process killed by a signal, but never of a process that exits
by itself, throws or is stopped (measured, Open MPI 5.0.11). The process started by mpirun therefore
stays behind as a guard of a few megabytes, and the rank runs as its child. When the child goes
without having reported itself done, or stays stopped for too long, the guard kills the child and
then itself, and mpirun tells all ranks. The guard does not wait until the system has taken the
child's memory back (ecrm/process/lifeline.py).

A stopped guard is killed by the other guards of its host, together with its rank. A guard also
keeps a fenced rank from ever coming back. The guard ends the rank when mpirun is gone, or when the
agent that started the guard on this host (ecrm/process/remote_agent.py) stays stopped: the other
ranks are about to go on without the rank.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import time
import traceback
from typing import NoReturn

from ecrm.device.pulse import Pulse, Unanswered
from ecrm.errors import Unrecoverable
from ecrm.process.calls import Calls, Stuck
from ecrm.process.lifeline import Lifeline
from ecrm.process.linux import when_parent_ends
from ecrm.process.neighbours import AwakeClock, Neighbours, Standing
from ecrm.process.preflight import say_once
from ecrm.process.remote_agent import GUARD_PATIENCE
from ecrm.process.startup import THE_START, Startup, died

MPIRUN_GOES = signal.SIGUSR1
"""The signal to a rank when mpirun itself was asked to end.

mpirun then sends SIGTERM to its children, kills the children soon after, and ends.
"""

_PASSED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: MPIRUN_GOES,
    signal.SIGUSR1: signal.SIGINT,
    signal.SIGUSR2: signal.SIGTERM,
}
"""The signal to the rank by signal to the guard.

mpirun hands SIGUSR1 and SIGUSR2 on and waits for the ranks. After SIGINT or SIGTERM mpirun kills
the ranks.
"""

_WATCHED = {signal.SIGCHLD, *_PASSED_ON}
_DYING = 0
"""A value among the signal numbers: the rank has begun to die."""
_POLL_SECONDS = 0.5
_DYING_SECONDS = 2.0
_NICE = 10
"""The niceness of a dying rank, whose memory the system is taking back.

With scarce cores the other ranks then recover before the memory is back, not after.
"""


class Guarded:
    """The rank's side of the guard: reports the rank's progress to the guard.

    Call `loaded()` before MPI starts, `up()` as soon as MPI is up, and `done()` just before leaving
    on purpose.
    """

    def __init__(self, descriptor: int, calls: Calls, lifeline: Lifeline, pulse: Pulse) -> None:
        self._descriptor, self._lifeline = descriptor, lifeline
        self.calls, self.pulse = calls, pulse
        lifeline.hold()

    def loaded(self) -> None:
        """Report that this rank has torch, and starts MPI next."""
        os.write(self._descriptor, b"l")

    def up(self) -> None:
        """Report that the other ranks now learn of this rank's death from MPI."""
        os.write(self._descriptor, b"u")

    def done(self) -> None:
        """Report that this process may now exit with any code, without counting as dead."""
        # a broken pipe: mpirun has killed the guard
        with contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, b"d")


class Parent:
    """The process that started a guard: mpirun, or the agent of a host.

    An agent sets the time that it may stay stopped before it counts as lost.
    """

    def __init__(self, pid: int, clock: AwakeClock) -> None:
        self._pid, self._standing = pid, Standing(clock)
        self._patience = float(os.environ.get(GUARD_PATIENCE, "inf"))
        self.poll_seconds = self._patience / 10

    def is_lost(self) -> bool:
        """Whether the parent is gone, or is an agent stopped for too long."""
        return os.getppid() != self._pid or (
            self._patience < float("inf") and self._standing.seconds(self._pid) >= self._patience
        )


def hold_signals() -> None:
    """Block the signals awaited by a guard, until the guard is ready.

    An early request to stop is then not lost, and does not kill.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)


def guard(
    hang_seconds: float,
    start_seconds: float,
    stuck_seconds: float = 0.0,
    gpu_hang_seconds: float = 10.0,
) -> Guarded:
    """Fork: return in the child, which goes on as the rank; the guard itself never returns.

    The guard kills its child: if stopped (SIGSTOP) for `hang_seconds`; if outside of calls for
    `stuck_seconds` after a first call, while calls are awaited (`Guarded.calls`), unless 0; if the
    `Parent` is lost; or if the GPU has not answered for `gpu_hang_seconds` (`Guarded.pulse`). The
    guard also kills other guards of this host stopped for `hang_seconds`. When the child or another
    rank of this host dies before MPI is up, or MPI is not up after `start_seconds`, the guard says
    so and ends with 3. Call before threads exist and before MPI starts.
    """
    reading, writing = os.pipe()
    mpirun, me, calls, lifeline = os.getppid(), os.getpid(), Calls(), Lifeline()
    pulse = Pulse(gpu_hang_seconds)
    hold_signals()
    child = os.fork()
    if child == 0:
        when_parent_ends(signal.SIGKILL)
        if os.getppid() != me:
            os._exit(1)  # the guard died before the line above
        os.setpgid(0, 0)  # mpirun signals groups: only the guard must get the signal
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        os.close(reading)
        return Guarded(writing, calls, lifeline, pulse)
    os.close(writing)
    os.set_blocking(reading, False)
    try:
        clock = AwakeClock(2 * _POLL_SECONDS)
        stuck = Stuck(calls, stuck_seconds, clock)
        startup = Startup(start_seconds, hang_seconds)
        unanswered = Unanswered(pulse, clock)
        parent = Parent(mpirun, clock)
        _watch(child, reading, lifeline, parent, hang_seconds, startup, stuck, unanswered, clock)
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
        _leave(0, done=False)


def _signals_as_bytes() -> tuple[int, int]:
    """(reading, writing) ends of a pipe for the numbers of signals to the guard.

    CPython's sigtimedwait reports a false signal after the process was stopped for longer than the
    timeout.
    """
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in _WATCHED:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    return reading, writing


def _watch(
    child: int,
    reading: int,
    lifeline: Lifeline,
    parent: Parent,
    hang_seconds: float,
    startup: Startup | None,
    stuck: Stuck,
    unanswered: Unanswered,
    clock: AwakeClock,
) -> NoReturn:
    stopped_since: float | None = None
    killed_at: float | None = None
    rank = 0 if startup is None else startup.rank
    neighbours = Neighbours(hang_seconds, clock=clock)
    signals, wake = _signals_as_bytes()
    dying = False
    said, asked = b"", False  # asked: to stop, a reason for ranks to end
    while True:
        select.select([signals], [], [], min(_POLL_SECONDS, hang_seconds / 4, parent.poll_seconds))
        for number in _read(signals):
            dying = dying or number == _DYING
            if number in _PASSED_ON:
                os.kill(child, _PASSED_ON[signal.Signals(number)])
                asked = True
        said += _read(reading)
        if b"l" in said and startup is not None:
            startup.loaded()
        if b"u" in said and startup is not None:
            startup = None
            with contextlib.suppress(RuntimeError):  # without a thread waitpid tells, later
                lifeline.watch(functools.partial(os.write, wake, bytes([_DYING])))
        while True:
            pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                stopped_since = clock()
            elif os.WIFCONTINUED(status):
                stopped_since = None
            else:
                said += _read(reading)
                if startup is not None and not {*b"ud"} & {*said} and not asked:
                    _end_start(died(startup.rank), startup)
                _leave(status, b"d" in said)
        if dying and b"d" not in said:
            with contextlib.suppress(OSError):  # the child may be gone
                # all threads of the child: any thread may end last
                os.setpriority(os.PRIO_PGRP, child, _NICE)
            _leave(0, done=False)
        if startup is None:
            neighbours.look()
        if startup is not None and (news := startup.news()) is not None:
            with contextlib.suppress(OSError):
                print(news, flush=True)
        if startup is not None and (trouble := startup.trouble()) is not None:
            os.kill(child, signal.SIGKILL)
            _bury(child)
            _end_start(trouble, startup, quietly=asked)
        hung = stopped_since is not None and clock() - stopped_since > hang_seconds
        lost = parent.is_lost()
        silent = b"d" not in said and unanswered.look()
        if silent and killed_at is None:
            with contextlib.suppress(OSError):
                print(_gpu_hangs(rank, unanswered.limit_seconds), file=sys.stderr, flush=True)
        is_stuck = b"d" not in said and stuck.look()
        if is_stuck and killed_at is None:
            with contextlib.suppress(OSError):
                print(_is_stuck(rank, stuck.seconds), file=sys.stderr, flush=True)
        if lost or hung or silent or is_stuck:
            startup = None if lost else startup
            os.kill(child, signal.SIGKILL)
            killed_at = killed_at or clock()
        if killed_at is not None and clock() - killed_at > _DYING_SECONDS:
            # the child dies when its system call returns, and does nothing before
            _leave(0, done=False)


def _is_stuck(rank: int, seconds: float) -> str:
    return (
        f"! rank {rank}: it has worked by itself for {seconds:g} s, without a call to other ranks "
        "(cluster.stuck_seconds): it hangs, or its code takes longer, which needs a larger "
        "cluster.stuck_seconds: the rank is killed"
    )


def _gpu_hangs(rank: int, seconds: float) -> str:
    return (
        f"! rank {rank}: its GPU has not done for {seconds:g} s what it was given "
        "(cluster.gpu_hang_seconds): it hangs, or is busy for longer, which needs a larger "
        "cluster.gpu_hang_seconds: the rank is killed"
    )


def _bury(child: int) -> None:
    """Wait for a killed child, but at most _DYING_SECONDS, since a system call may not return."""
    deadline = time.monotonic() + _DYING_SECONDS
    while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)


def _end_start(trouble: str, startup: Startup, quietly: bool = False) -> NoReturn:
    """End a run before its begin, after the rank has died.

    One guard of this host prints the reason; all guards end with the same exit code.
    """
    startup.kill_strays()
    if not quietly:
        say_once(f"ecrm: error: {trouble}", about=THE_START)
    os._exit(Unrecoverable.exit_code)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 64)
    except BlockingIOError:
        return b""


def _leave(status: int, done: bool) -> NoReturn:
    """End like the child if the child was done, else by SIGKILL, noticed by all."""
    if done and os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")

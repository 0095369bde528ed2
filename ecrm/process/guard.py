"""A guard process beside each rank turns every way of dying into SIGKILL, which MPI reports.

ULFM learns within milliseconds of a process killed by a signal, but never of a process that exits
by itself, throws or is stopped (measured, Open MPI 5.0.11). The process started by mpirun therefore
stays behind as a guard of a few megabytes, and the rank is another process, forked from the fork
server of the host (ecrm/process/fork_server.py) or from the guard. When the rank goes without
having reported itself done, or stays stopped for too long, the guard kills the rank and then
itself, and mpirun tells all ranks. The guard does not wait until the system has taken the memory of
the rank back (ecrm/process/lifeline.py).

A stopped guard is killed by the other guards of its host, together with its rank. A guard also
keeps a fenced rank from ever coming back. The guard ends the rank when mpirun is gone, or when the
agent that started the guard on this host (ecrm/process/remote_agent.py) stays stopped: the other
ranks are about to go on without the rank.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ecrm.base.errors import Unrecoverable
from ecrm.device.pulse import Pulse, Unanswered
from ecrm.process.calls import CallCount, Stuck
from ecrm.process.farewell import OTHERS_SECONDS
from ecrm.process.fork_server import Born, Ends, Tether, join, send_order
from ecrm.process.lifeline import Lifeline
from ecrm.process.neighbours import AwakeClock, Neighbours, PidNotes, StoppedTimer
from ecrm.process.preflight import LAUNCHERS, say_once
from ecrm.process.remote_agent import GUARD_PATIENCE
from ecrm.process.startup import NO_TORCH, THE_START, Startup, died
from ecrm.process.title import name_guard

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

_WATCHED = {*_PASSED_ON}
_DYING = 0
"""A value among the signal numbers: the rank has begun to die."""
_POLL_SECONDS = 0.5
_DYING_SECONDS = 2.0
_NICE = 10
"""The niceness of a dying rank, whose memory the system is taking back.

With scarce cores the other ranks then recover before the memory is back, not after.
"""


class Shared:
    """Memory shared by a rank and its guard: the lifeline, the count of calls, the GPU's pulse."""

    def __init__(self, memory: int, gpu_hang_seconds: float) -> None:
        """`memory` is a file of at least BYTES bytes, of zeros at first."""
        pages = [mmap.mmap(memory, PAGE, offset=number * PAGE) for number in range(PAGES)]
        self.lifeline, self.calls = Lifeline(pages[0]), CallCount(pages[1])
        self.pulse = Pulse(gpu_hang_seconds, pages[2])


PAGE, PAGES = mmap.PAGESIZE, 3


class Guarded:
    """The rank's side of the guard: reports the rank's progress to the guard.

    `guard` is the pid of the guard, and `tether` ends the rank with the guard. Call `loaded()`
    before MPI starts, `up()` as soon as MPI is up, and `done()` just before leaving on purpose.
    """

    def __init__(self, ends: Ends, shared: Shared) -> None:
        self._news, self.guard, self.tether = ends.news, ends.guard, Tether(ends.tether)
        self._shared = shared  # the lock of the lifeline must stay mapped
        self.calls, self.pulse = shared.calls, shared.pulse
        shared.lifeline.hold()

    def loaded(self) -> None:
        """Report that this rank has torch, and starts MPI next."""
        os.write(self._news, b"l")

    def up(self) -> None:
        """Report that the other ranks now learn of this rank's death from MPI."""
        os.write(self._news, b"u")

    def done(self, code: int) -> None:
        """Report that this process is about to exit with `code`, and does not count as dead."""
        # a broken pipe: mpirun has killed the guard
        with contextlib.suppress(BrokenPipeError):
            os.write(self._news, b"d%d" % code)


class Parent:
    """The process that started a guard: mpirun, or the agent of a host.

    An agent sets the time that it may stay stopped before it counts as lost.
    """

    def __init__(self, pid: int, clock: AwakeClock) -> None:
        self._pid, self._standing = pid, StoppedTimer(clock)
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
    load: Sequence[str] = (),
    alike: str = "",
) -> Guarded:
    """Return in a process that goes on as the rank; the guard itself never returns.

    `load` are modules to import once for all ranks of this host, before the ranks are forked; ranks
    with another `alike`, such as another config, are forked from another process.

    The guard kills its rank: if stopped (SIGSTOP) for `hang_seconds`; if outside of calls for
    `stuck_seconds` after a first call, while calls are awaited (`Guarded.calls`), unless 0; if the
    `Parent` is lost; or if the GPU has not answered for `gpu_hang_seconds` (`Guarded.pulse`). The
    guard also kills other guards of this host stopped for `hang_seconds`. When its rank or another
    rank of this host dies before MPI is up, or MPI is not up after `start_seconds`, the guard says
    so and ends the start with 3. Call before threads exist and before MPI starts.
    """
    mpirun = os.getppid()
    hold_signals()
    server = join(load, alike)
    if isinstance(server, Ends):
        return _as_rank(server, gpu_hang_seconds)
    reading, writing = os.pipe()
    tied, tie = os.pipe()
    memory = os.memfd_create("guard", os.MFD_CLOEXEC)
    os.ftruncate(memory, PAGES * PAGE)
    ends = Ends(os.getpid(), writing, tied, memory)
    shared = Shared(memory, gpu_hang_seconds)
    shared.lifeline.begin()
    if server is not None:
        send_order(server, ends)
        rank = Born(server)
    elif child := os.fork():
        rank = Born.child(child)
    else:
        os.close(reading)
        os.close(tie)
        return _as_rank(ends, gpu_hang_seconds)
    name_guard()
    for descriptor in (writing, tied, memory):
        os.close(descriptor)
    os.set_blocking(reading, False)
    try:
        clock = AwakeClock(2 * _POLL_SECONDS)
        stuck = Stuck(shared.calls, stuck_seconds, clock)
        startup = Startup(start_seconds, hang_seconds)
        unanswered = Unanswered(shared.pulse, clock)
        parent = Parent(mpirun, clock)
        _watch(
            rank, reading, shared.lifeline, parent, hang_seconds, startup, stuck, unanswered, clock
        )
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        rank.signal(signal.SIGKILL)
        _leave(None)


def _as_rank(ends: Ends, gpu_hang_seconds: float) -> Guarded:
    """Go on as the rank of a guard."""
    guarded = Guarded(ends, Shared(ends.memory, gpu_hang_seconds))
    os.close(ends.memory)
    guarded.tether.tie()
    os.setpgid(0, 0)  # mpirun signals groups: only the guard must get the signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    return guarded


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
    rank: Born,
    reading: int,
    lifeline: Lifeline,
    parent: Parent,
    hang_seconds: float,
    startup: Startup | None,
    stuck: Stuck,
    unanswered: Unanswered,
    clock: AwakeClock,
) -> NoReturn:
    killed_at: float | None = None
    number_of_rank = 0 if startup is None else startup.rank
    neighbours, standing = Neighbours(hang_seconds, clock=clock), StoppedTimer(clock)
    signals, wake = _signals_as_bytes()
    dying = False
    said, asked = b"", False  # asked: to stop, a reason for ranks to end
    if rank.pid and startup is not None:
        startup.born(rank.pid)
    while True:
        patience = min(_POLL_SECONDS, hang_seconds / 4, parent.poll_seconds)
        select.select([signals, rank.fileno()], [], [], patience)
        if rank.look() and startup is not None:
            startup.born(rank.pid)
        for number in _read(signals):
            dying = dying or number == _DYING
            if number in _PASSED_ON:
                rank.signal(_PASSED_ON[signal.Signals(number)])
                asked = True
        said += _read(reading)
        if b"l" in said and startup is not None:
            startup.loaded()
        if b"u" in said and startup is not None:
            startup = None
            with contextlib.suppress(RuntimeError):  # without a thread the pidfd tells, later
                lifeline.watch(functools.partial(os.write, wake, bytes([_DYING])))
        if rank.has_ended:
            said += _read(reading)
            if startup is not None and not {*b"ud"} & {*said} and not asked:
                _end_start(NO_TORCH if rank.is_unborn else died(startup.rank), startup)
            code = _code(said)
            if code and startup is None:
                # mpirun ends the other ranks a second after the first code that is not 0
                PidNotes().await_ranks(OTHERS_SECONDS)
            _leave(code)
        if dying and b"d" not in said:
            with contextlib.suppress(OSError):  # the rank may be gone
                # all threads of the rank: any thread may end last
                os.setpriority(os.PRIO_PGRP, rank.pid, _NICE)
            _leave(None)
        if startup is None:
            neighbours.look()
        if startup is not None and (news := startup.news()) is not None:
            with contextlib.suppress(OSError):
                print(news, flush=True)
        if startup is not None and (trouble := startup.trouble()) is not None:
            rank.signal(signal.SIGKILL)
            _bury(rank)
            _end_start(trouble, startup, quietly=asked)
        hung = rank.pid != 0 and standing.seconds(rank.pid) > hang_seconds
        lost = parent.is_lost()
        silent = b"d" not in said and unanswered.look()
        if silent and killed_at is None:
            with contextlib.suppress(OSError):
                print(
                    _gpu_hangs(number_of_rank, unanswered.limit_seconds),
                    file=sys.stderr,
                    flush=True,
                )
        is_stuck = b"d" not in said and stuck.look()
        if is_stuck and killed_at is None:
            with contextlib.suppress(OSError):
                print(_is_stuck(number_of_rank, stuck.seconds), file=sys.stderr, flush=True)
        if lost or hung or silent or is_stuck:
            startup = None if lost else startup
            rank.signal(signal.SIGKILL)
            killed_at = killed_at or clock()
        # a rank asked to stop before its birth ends with its guard
        if (asked and not rank.pid) or (
            killed_at is not None and clock() - killed_at > _DYING_SECONDS
        ):
            # the rank dies when its system call returns, and does nothing before
            _leave(None)


def _code(said: bytes) -> int | None:
    """The exit code announced by `Guarded.done`; `None` without an announcement."""
    _, done, code = said.partition(b"d")
    return int(code) if done else None


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


def _bury(rank: Born) -> None:
    """Wait for a killed rank, but at most _DYING_SECONDS, since a system call may not return."""
    if rank.pid:
        select.select([rank], [], [], _DYING_SECONDS)


def _end_start(trouble: str, startup: Startup, quietly: bool = False) -> NoReturn:
    """End a run before its begin, after the rank has died.

    One guard of this host prints the reason, and the first to leave gives mpirun the exit code.
    """
    startup.kill_strays()
    if not quietly:
        say_once(f"ecrm: error: {trouble}", about=THE_START)
    _leave(Unrecoverable.exit_code)


def _is_of_mpirun() -> bool:
    """Whether mpirun itself, or its daemon on this host, has started this process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip() in (*LAUNCHERS, "prted")
    return False


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 64)
    except BlockingIOError:
        return b""


def _leave(code: int | None) -> NoReturn:
    """End with the announced exit code of the rank, else by SIGKILL, noticed by all.

    Of the guards that mpirun has started on a host, only the first ends with an exit code other
    than 0. mpirun counts such an end twice, and then takes the job for ended too early: the end of
    a later rank finds freed memory in mpirun, and mpirun crashes or hangs (Open MPI 5.0.11,
    docs/decisions/ulfm.md). An agent, or a user's program around the guard, gets every code.
    """
    if code == 0 or (code is not None and (not _is_of_mpirun() or PidNotes().is_first_to_leave())):
        os._exit(code)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")

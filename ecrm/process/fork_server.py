"""A fork server: one process of a host imports torch, and the host's ranks are forked from it.

An import of torch and torchrec takes 5 s of CPU and 150 MB. Without the server every rank of a host
pays for an import of its own.

The first guard of a host starts the server. Every guard sends an order: the variables of its
process, and the open files of the rank. The server imports the modules, then forks a rank for each
order. So a rank is no child of its guard: a `Tether` ends the rank together with the guard, and a
pidfd tells the guard of the end of the rank.

Only guards with the same program, arguments, folder and variables share a server. A rank started by
an agent imports for itself: an agent ends all its descendants with its rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ecrm.process.linux import when_parent_ends
from ecrm.process.neighbours import JOB
from ecrm.process.preflight import JOB_FOLDER
from ecrm.process.remote_agent import GUARD_PATIENCE

OF_MPIRUN = ("OMPI_", "OPAL_", "PMIX_", "PMI_", "PRTE_")
"""Prefixes of variables set by mpirun, such as the number of the rank."""
IDLE_SECONDS = 60.0
"""Time after which a server without orders ends."""
_BACKLOG = 4096
_STANDARD = (0, 1, 2)
_ORDERED = 7
"""The number of open files in an order."""
_PID = struct.Struct("q")


class Tether:
    """Ends a rank together with its guard, which holds the other end of a pipe open.

    The kernel kills the rank as soon as the other end closes, however the guard dies.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def tie(self) -> None:
        """Have this process die by SIGKILL with the guard; end it now if the guard is gone."""
        fcntl.fcntl(self._descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._descriptor, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        if self.is_broken:
            os._exit(1)

    def untie(self) -> None:
        """Let this process outlive the guard."""
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, os.O_NONBLOCK)

    @property
    def is_broken(self) -> bool:
        """Whether the guard is gone."""
        return bool(select.select([self._descriptor], [], [], 0)[0])


_F_SETSIG = 10  # linux/fcntl.h


@dataclass(frozen=True)
class Ends:
    """The open files between a rank and its guard, on the side of the rank.

    - `guard`: the pid of the guard.
    - `news`: the writing end of a pipe for the progress of the rank.
    - `tether`: the reading end of a pipe; the guard holds the writing end.
    - `memory`: a file of memory shared with the guard.
    """

    guard: int
    news: int
    tether: int
    memory: int


class Born:
    """A guard's view of its rank, a process forked now or later.

    `connection` leads to a server that is to fork the rank. Without a connection the rank is
    `pid`, and `descriptor` is its pidfd.
    """

    def __init__(
        self, connection: socket.socket | None, pid: int = 0, descriptor: int = -1
    ) -> None:
        self._connection, self.pid, self._descriptor = connection, pid, descriptor
        self._lost = False

    @classmethod
    def child(cls, pid: int) -> Born:
        """The view of a child of this process."""
        return cls(None, pid, os.pidfd_open(pid))

    def fileno(self) -> int:
        """The descriptor that becomes readable at the birth and at the end, for select."""
        return self._descriptor if self._connection is None else self._connection.fileno()

    def look(self) -> bool:
        """Take note of the birth; whether the process is born in this call."""
        if self._connection is None or self._lost:
            return False
        try:
            said, files = _receive(self._connection, _PID.size, 1)
        except BlockingIOError:
            return False
        except OSError:
            files = []
        if not files:  # the server has ended
            self._lost = True
            return False
        (self.pid,), (self._descriptor,) = _PID.unpack(said), files
        self._connection.close()
        self._connection = None
        return True

    @property
    def is_unborn(self) -> bool:
        """Whether the server has ended before the birth."""
        return self._lost

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, or is unborn."""
        return self._lost or (
            self._connection is None and bool(select.select([self._descriptor], [], [], 0)[0])
        )

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it is alive."""
        if self._connection is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)


def join(
    load: Sequence[str], alike: str, environ: Mapping[str, str] = os.environ
) -> socket.socket | Ends | None:
    """Connect to the server of guards like this one, and start the server before if there is none.

    `load` are the names of modules to import. Ranks of one server have `alike` in common, besides
    program, arguments, folder and variables. Returns the connection in the guard, and the ends of
    the rank in every rank forked from the server. Returns `None` if the guard is to fork its rank
    itself: without modules to import, without a folder of mpirun, or with an agent. Call before
    opening files for a rank: the server would keep the files open.
    """
    folder = environ.get(JOB_FOLDER)
    if not load or folder is None or GUARD_PATIENCE in environ:
        return None
    try:
        at = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    except OSError:  # the daemon of mpirun is not on this host
        return None
    try:
        name = f"/proc/self/fd/{at}/ecrm-ranks-{_digest(alike, environ)}"
        try:
            listener = _listener(name)
        except OSError:  # a file system without sockets: each rank imports by itself
            return None
        if listener is not None:
            guard = os.getpid()
            if os.fork() == 0:
                return _serve(listener, load, guard)
            listener.close()
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):  # the server has ended: `Born` sees it
            connection.connect(name)
        return connection
    finally:
        os.close(at)


def send_order(connection: socket.socket, ends: Ends) -> None:
    """Order a rank with the variables and the standard files of this process."""
    order = os.memfd_create("order", os.MFD_CLOEXEC)
    said = {"guard": ends.guard, "variables": dict(os.environ), "cores": [*os.sched_getaffinity(0)]}
    os.write(order, json.dumps(said).encode())
    with contextlib.suppress(OSError):  # the server has ended: `Born` sees it
        socket.send_fds(
            connection, [b"o"], [order, *_STANDARD, ends.news, ends.tether, ends.memory]
        )
    connection.setblocking(False)
    os.close(order)


def _digest(alike: str, environ: Mapping[str, str]) -> str:
    """A digest of all that ranks forked from one server have in common.

    The name of the host counts: hosts may share the folder of mpirun.
    """
    variables = sorted(each for each in environ.items() if not each[0].startswith(OF_MPIRUN))
    host = os.uname().nodename
    common = [host, alike, environ.get(JOB), sys.orig_argv, os.getcwd(), variables]
    return hashlib.sha256(json.dumps(common).encode()).hexdigest()[:16]


def _listener(name: str) -> socket.socket | None:
    """A socket listening at the path `name`; `None` if another process listens there."""
    listener = socket.socket(socket.AF_UNIX)
    draft = f"{name}-{os.getpid()}"
    try:
        listener.bind(draft)
        listener.listen(_BACKLOG)
        os.link(draft, name)  # the name appears once connections are taken
    except FileExistsError:
        listener.close()
        return None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(draft)
    return listener


def import_at_once(names: Iterable[str]) -> None:
    """Import modules without a collection of garbage in between: a fifth less CPU time for torch.

    A module that is not there is left out: its user tells so. The traceback of any other error is
    printed, since a second import of torch fails by another error.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        for name in names:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:
                pass
            except Exception:
                traceback.print_exc()
    finally:
        if collected:
            gc.enable()


def _receive(connection: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Receive at most `size` bytes and `most` open files.

    Raises BlockingIOError for nothing yet, if the connection is not to block. (Python 3.11's
    socket.recv_fds leaves out its flags.)
    """
    files = array("i")
    room = socket.CMSG_LEN(most * files.itemsize)
    said, others, *_ = connection.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in others:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    return said, list(files)


def _serve(listener: socket.socket, load: Sequence[str], guard: int) -> Ends:
    """Be the server, started by `guard`: import the modules, then fork a rank for each order.

    Returns in the ranks. The server ends after its last rank, or with the guard before its first.
    """
    when_parent_ends(signal.SIGKILL)
    os.setpgid(0, 0)  # mpirun signals groups: only guards must get the signals
    import_at_once(load)
    when_parent_ends(0)
    if os.getppid() != guard:
        os._exit(0)
    gc.collect()
    gc.freeze()  # a collection in a rank would copy the pages of all these objects
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in _STANDARD:  # mpirun waits until all ends of its pipes are closed
        os.dup2(nothing, number)
    os.close(nothing)
    came, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    born, watched = 0, [listener.fileno(), came]
    while True:
        ready, _, _ = select.select(watched, [], [], None if born else IDLE_SECONDS)
        if came in ready:
            os.read(came, 64)
        born -= sum(1 for _ in _reaped())
        if listener.fileno() in ready:
            connection, _ = listener.accept()
            files = _receive(connection, 1, _ORDERED)[1]
            if len(files) < _ORDERED:  # the guard has died
                connection.close()
                continue
            if (pid := os.fork()) == 0:
                for each in (listener, connection):
                    each.close()
                for descriptor in (came, wake):
                    os.close(descriptor)
                return _begin(files)
            born += 1
            _tell(connection, pid)
            for descriptor in files:
                os.close(descriptor)
        elif not born:
            os._exit(0)


def _reaped() -> Iterator[int]:
    """The pids of children that have ended since the last call."""
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            yield pid


def _tell(connection: socket.socket, pid: int) -> None:
    """Tell a guard its rank."""
    descriptor = os.pidfd_open(pid)
    with contextlib.suppress(OSError):  # the guard has died
        socket.send_fds(connection, [_PID.pack(pid)], [descriptor])
    os.close(descriptor)
    connection.close()


def _begin(files: Sequence[int]) -> Ends:
    """Become the rank of an order."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    order, *standard, news, tether, memory = files
    for descriptor, number in zip(standard, _STANDARD, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with open(order, "rb") as file:
        file.seek(0)
        said: dict[str, Any] = json.loads(file.read())
    os.environ.clear()
    os.environ.update(said["variables"])
    os.sched_setaffinity(0, said["cores"])
    return Ends(said["guard"], news, tether, memory)

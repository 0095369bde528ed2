"""Processes beside a rank, making objects for the rank ahead of use."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import multiprocessing
import os
import pickle
import signal
import stat
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from ecrm.base.errors import EcrmError, UsageError
from ecrm.process.linux import when_parent_ends
from ecrm.run.user_frames import own_traceback
from ecrm.session.parcel import packed_into_memory, unpacked_from_memory

PATIENCE_SECONDS = 600.0
"""The longest wait of a rank for one object from a worker."""
_END_SECONDS = 5.0


class InWorker(Exception):
    """The traceback of an error in a worker, as the cause of the same error in the rank."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class WorkerLost(EcrmError):
    """A worker has died or hangs. The message names the unfinished object."""


@dataclass(frozen=True)
class _Failed:
    """The failure of a task: the error, `None` if pickle cannot carry the error."""

    error: BaseException | None
    said: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> _Failed:
        try:
            carried = pickle.loads(pickle.dumps(error))
        except Exception:
            carried = None
        said = traceback.format_exception_only(error)[-1].strip()
        return cls(carried, said, own_traceback(error))

    def raise_it(self) -> NoReturn:
        raise self.error or RuntimeError(self.said) from InWorker(self.traceback)


class Worker:
    """One process making objects, one after the other: `make(task)` for each task.

    The worker is a fork of the present process, made at once: `make` may be any function, and may
    use all objects of the process, except the memory of `lazy_zeros`. Files open for reading have
    positions of their own in the worker. The worker ends when the thread that made the worker
    ends, for any reason. Torch has one thread in the worker.
    """

    def __init__(self, make: Callable[[Any], Any], name: str, others: Iterable[Worker] = ()):
        context = multiprocessing.get_context("fork")
        self.name = name
        self._link, its = context.Pipe()
        close = [self._link, *(worker._link for worker in others)]
        self._process = context.Process(
            target=_work, args=(make, its, close, os.getpid()), name=name, daemon=True
        )
        self._process.start()
        its.close()
        self._tasks: deque[Any] = deque()

    @property
    def waiting(self) -> int:
        """The number of tasks sent and not yet answered."""
        return len(self._tasks)

    def ask(self, task: Any) -> None:
        """Send a task: `answer` gives the results in order of asking."""
        self._tasks.append(task)
        with contextlib.suppress(OSError):  # the worker is dead, and `answer` says so
            self._link.send(task)

    def answer(self, patience: float = PATIENCE_SECONDS) -> Any:
        """Wait for the result of the oldest open task.

        Raises the error of `make`, with the worker's traceback as its cause, and WorkerLost if the
        worker dies or takes longer than `patience` seconds.
        """
        try:
            if not self._link.poll(patience):
                raise WorkerLost(
                    f"{self.name} has not made {self._tasks[0]} in {patience:g} s: make it in less"
                )
            self._link.recv_bytes()
            memory = reduction.recv_handle(self._link)
        except (OSError, EOFError):
            raise WorkerLost(
                f"{self.name} {self._death()} while it made {self._tasks[0]}"
            ) from None
        try:
            made = unpacked_from_memory(memory)
        finally:
            os.close(memory)
        self._tasks.popleft()
        if isinstance(made, _Failed):
            made.raise_it()
        return made

    def _death(self) -> str:
        """The death of the worker, in words."""
        self._process.join(_END_SECONDS)
        code = self._process.exitcode
        if code is None or code >= 0:
            return "has gone" if code is None else f"has ended with exit code {code}"
        name = signal.Signals(-code).name
        short = ", as the system does where memory runs out," if name == "SIGKILL" else ""
        return f"was killed by {name}{short}"

    def close(self) -> None:
        """Kill the worker. No thread may be waiting for an answer."""
        self._process.kill()
        self._process.join(_END_SECONDS)
        self._link.close()


def _work(make: Callable[[Any], Any], link: Connection, close: list[Connection], rank: int) -> None:
    when_parent_ends(signal.SIGKILL)
    if os.getppid() != rank:
        os._exit(1)  # the rank died before the line above
    for other in close:
        other.close()
    try:
        _open_files_anew()
    except UsageError as error:
        told = _Failed.of(error)
        make = lambda task: told.raise_it()  # noqa: E731
    gc.freeze()  # a collection would copy every page shared with the rank
    torch.set_num_threads(1)  # OpenMP waits forever for threads from before the fork
    while True:
        try:
            task = link.recv()
        except (EOFError, OSError):  # the rank is gone, and the worker will be killed
            return
        memory = _made(make, task)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        with contextlib.suppress(OSError):
            link.send_bytes(b"made")
            reduction.send_handle(link, memory, rank)
        os.close(memory)


def _open_files_anew() -> None:
    """Open every readable file again: a fork shares the file positions of its parent.

    Otherwise a seek in one process would move the position of the other process. Files behind
    stdout and stderr stay shared. Raises UsageError for a file impossible to open again.
    """
    left = {None, _file(1), _file(2)}
    for name in os.listdir("/proc/self/fd"):
        descriptor, path = int(name), f"/proc/self/fd/{name}"
        if _file(descriptor) in left:
            continue
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
        if flags & os.O_ACCMODE == os.O_WRONLY:
            continue
        try:
            own = os.open(path, flags)
            os.lseek(own, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        except OSError as error:
            raise UsageError(
                f"{os.readlink(path)} is open, and a worker cannot open it once more: "
                f"{error.strerror}",
                otherwise="close it before the first batch, or leave out workers",
            ) from None
        os.dup2(own, descriptor, inheritable=os.get_inheritable(descriptor))
        os.close(own)


def _file(descriptor: int) -> tuple[int, int] | None:
    """Device and inode of an open regular file; `None` for any other or closed descriptor."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def _made(make: Callable[[Any], Any], task: Any) -> int:
    """The result or failure of a task, packed into memory."""
    try:
        made = make(task)
    except BaseException as error:
        return packed_into_memory(_Failed.of(error))
    try:
        return packed_into_memory(made)
    except Exception as error:
        told = UsageError(
            f"{task} cannot be sent from its worker: {' '.join(str(error).split())}",
            otherwise="return what pickle can write, or leave out workers",
        )
        return packed_into_memory(_Failed.of(told))

"""One owner per run folder: a lock held by every rank, on any host, until the rank dies.

Imports no torch. Locks of fcntl(2), not of flock(2): a lock belongs to a process, so a guard or a
lent descriptor does not keep the lock. Locks of fcntl(2) work over NFS, and a holder can turn an
exclusive lock into a shared lock without letting go.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import time
from io import FileIO
from pathlib import Path
from typing import Any

from ecrm.base.errors import UsageError
from ecrm.base.lock_holders import POLL_SECONDS, patience
from ecrm.protection.mapped_files.file_access import open_file
from ecrm.run.reading import launch_id, read_json

LOCK = "lock"
JOIN = ".join.json"
"""The file of a run over several hosts that ranks can join, see `ecrm.run.joining`."""
RECORD_BYTES = 512
"""Size of the owner's record in the file: run, host, process and start."""

_FLOCK = "hhqqi4x"  # struct flock of fcntl(2)


class RunLock:
    """The hold of a rank on a run folder, from `take` or `join` to the end of the process.

    A rank must not open the file a second time: closing the second descriptor drops the lock.
    """

    def __init__(self, folder: Path, host: str) -> None:
        self._folder, self._host = folder, host
        self._file = open_file(folder / LOCK)

    def take(self) -> None:
        """Take the folder for this run alone, and write the owner into the file.

        Then keeps a shared lock, like every rank of the run. Raises UsageError, OSError.
        """
        self._lock(fcntl.LOCK_EX)
        owner = {
            "run": run_id(),
            "host": self._host,
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
        # same size, single write: no reader sees half a record, or the end of a longer record
        record = json.dumps(owner).encode().ljust(RECORD_BYTES - 1) + b"\n"
        self._file.truncate(os.pwrite(self._file.fileno(), record, 0))
        fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def join(self) -> None:
        """Hold the folder taken by a peer rank of this run. Raises UsageError, OSError."""
        self._lock(fcntl.LOCK_SH)

    @property
    def is_mine(self) -> bool:
        """Whether the file names this run as the owner."""
        with contextlib.suppress(ValueError, OSError):
            owner: dict[str, Any] = json.loads(os.pread(self._file.fileno(), 4096, 0))
            return owner.get("run") == run_id()
        return False

    def _lock(self, kind: int) -> None:
        began = time.monotonic()
        while True:
            try:
                fcntl.lockf(self._file, kind | fcntl.LOCK_NB)
                if os.fstat(self._file.fileno()).st_nlink:
                    return
                # an aborted launch has removed the locked file
                self._file = open_file(self._folder / LOCK)
            except (BlockingIOError, PermissionError):
                _refuse(self._folder, _holder(self._file), time.monotonic() - began)
                time.sleep(POLL_SECONDS)


def refuse_if_held(folder: Path) -> None:
    """Raise UsageError, naming the holder, if a live run writes into `folder`.

    Takes no lock.
    """
    began = time.monotonic()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), FileIO(folder / LOCK) as file:
        while (holder := _holder(file)) is not None:
            _refuse(folder, holder, time.monotonic() - began)
            time.sleep(POLL_SECONDS)


def is_held(folder: Path) -> bool:
    """Whether a live run writes into `folder`.

    Takes no lock. A process holding the folder itself must not ask.
    """
    with contextlib.suppress(OSError), FileIO(folder / LOCK) as file:
        return _holder(file) is not None
    return False


def check_run_dir(folder: Path, mine: bool = False) -> None:
    """Raise UsageError if a new run must not write into `folder`.

    A run never mixes with files in the folder. `mine`: this process holds the folder.
    """
    try:
        if not mine:
            refuse_if_held(folder)
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--run-dir {folder}: not a folder; name one that is new or empty")
        if (folder / "summary.json").exists():
            raise UsageError(
                f"--run-dir {folder}: holds a finished run; name a folder that is new or empty"
            )
        if not is_empty(folder):
            goes_on = (
                " type --resume auto to go on with the run in it, or"
                if (folder / "events.jsonl").exists()
                else ""
            )
            raise UsageError(
                f"--run-dir {folder}: not empty;{goes_on} name a folder that is new or empty"
            )
    except OSError as error:
        raise UsageError(
            f"--run-dir {folder}: {error.strerror}; name a folder that is new or empty"
        ) from None


def make_run_dir(folder: Path) -> None:
    """Make a run folder readable only by the owner; an existing folder keeps its mode.

    Raises OSError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def is_empty(folder: Path) -> bool:
    """Whether `folder` has no files of a run, or is no folder.

    The lock of a run not yet begun does not count. Raises OSError.
    """
    return not folder.is_dir() or all(entry.name == LOCK for entry in folder.iterdir())


def remove_empty(folder: Path) -> None:
    """Remove a folder without files of a run, and not held by a run.

    Raises OSError if the folder stays.
    """
    if (folder / LOCK).exists():
        with open_file(folder / LOCK) as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / LOCK).unlink()
    folder.rmdir()


def run_id() -> str:
    """The name of a start of a run: the same on all its ranks, different for every start."""
    return launch_id() or os.environ.get("PMIX_NAMESPACE") or f"process {os.getpid()}"


def _holder(file: FileIO) -> int | None:
    """The process keeping `file` from being locked, `None` without a holder.

    0 if this machine does not see the process.
    """
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


def _refuse(folder: Path, holder: int | None, seconds: float) -> None:
    """Raise UsageError if a holder has not let go within its `patience`."""
    if holder is None or seconds < patience(holder):
        return
    owner: dict[str, Any] = read_json(folder / LOCK)
    # a holder seen runs on this machine; the pid in the record is of the owner's host
    where = "this host" if holder else f"host {owner.get('host', '?')}"
    joins = ""
    if (folder / JOIN).exists():
        joins = f"; for a lost host of the run, type ecrm join {folder} --host NAME"
    raise UsageError(
        f"--run-dir {folder}: in use by a run that is alive, on host {owner.get('host', '?')} "
        f"since {owner.get('since', '?')}: wait for its end, stop it with "
        f"kill {holder or owner.get('pid', '?')} on {where}, or name another folder{joins}"
    )

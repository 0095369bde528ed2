"""Output that appears under its name only when complete and on disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ecrm.base.errors import EcrmError, UsageError
from ecrm.base.lock_holders import POLL_SECONDS, holder_of, patience

_USERS_MISTAKE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}

# a cluster's file system may not have locks
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    """Turn an OSError of the body into one clear line about `target`."""
    try:
        yield
    except OSError as error:
        kind = UsageError if error.errno in _USERS_MISTAKE else EcrmError
        raise kind(
            f"{target}: cannot be written, nothing was changed there: {error.strerror or error}"
        ) from error


def _beside(target: Path, ending: str) -> Path:
    """The hidden name next to `target` with the given ending.

    Raises `UsageError` for the root folder: nothing can stand next to the root.
    """
    if not target.name:
        raise UsageError(f"{target}: cannot be written: it is the root folder; name one in it")
    return target.with_name(f".{target.name}.{ending}")


def _make_parent(target: Path) -> None:
    """Make the parent directory of `target`, if missing.

    Raises `UsageError` if a file is in the way.
    """
    existing = next(path for path in target.parents if path.exists())
    if not existing.is_dir():
        raise UsageError(f"{target}: cannot be written: {existing} is not a directory")
    target.parent.mkdir(parents=True, exist_ok=True)


def _lock(descriptor: int) -> None:
    """Lock an open file or directory, if its file system has locks.

    Waits for a dying holder: the system takes back the holder's memory before the lock. Raises
    BlockingIOError if another process holds the lock for longer than `patience`.
    """
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() - began >= patience(holder_of(descriptor)):
                raise
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return
        time.sleep(POLL_SECONDS)


def _claim(path: Path, target: Path) -> int:
    """Lock the staging directory or file at `path`, and return its descriptor.

    A missing file is made. Raises `UsageError` if another process holds the lock.
    """
    flags = (
        os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    )
    descriptor = os.open(path, flags, 0o666)
    try:
        _lock(descriptor)
        # The former holder may have renamed the file between our open and our lock.
        if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):
        os.close(descriptor)
        raise UsageError(f"{target}: another process is writing it") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _empty(directory: Path) -> None:
    """Remove the files left by a killed process in its staging directory."""
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@contextmanager
def staged_directory(target: Path, check: Callable[[], None]) -> Iterator[Path]:
    """Let the body fill a directory, which becomes `target` when the body succeeds.

    The directory stands next to `target` until the rename. `check` is called before the body and
    raises if the present `target` must not be replaced. The body syncs the files it writes. If the
    body raises, its directory is removed and `target` is as before. After a killed process, the
    next call clears up. Replacing takes two renames: a process killed between the renames leaves
    the old directory as `.NAME.replaced`, which the next call moves back. Raises `UsageError` or
    `EcrmError` instead of OSError, also for an OSError of the body.
    """
    staged = _beside(target, "preparing")
    displaced = _beside(target, "replaced")
    with _write_errors(target):
        _make_parent(target)
        staged.mkdir(exist_ok=True)
        lock = _claim(staged, target)
        try:
            if displaced.exists() and not target.exists():
                displaced.rename(target)
            check()
            _empty(staged)
            yield staged
            sync_directory(staged)
            if displaced.exists():
                shutil.rmtree(displaced)
            if target.exists():
                target.rename(displaced)
            staged.rename(target)
            sync_directory(target.parent)
            if displaced.exists():
                shutil.rmtree(displaced)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        finally:
            os.close(lock)


@contextmanager
def staged_file(target: Path) -> Iterator[BinaryIO]:
    """Let the body write a file, which replaces `target` when the body succeeds.

    The file stands next to `target` until the rename. If the body raises, the new file is removed
    and `target` is as before. Raises `UsageError` or `EcrmError` instead of OSError, also for an
    OSError of the body.
    """
    staged = _beside(target, "writing")
    with _write_errors(target):
        # A rename would replace a device such as /dev/null by a file.
        if target.exists() and not target.is_file():
            raise UsageError(f"{target}: exists and is not a file")
        _make_parent(target)
        descriptor = _claim(staged, target)
        try:
            os.ftruncate(descriptor, 0)
            with open(descriptor, "wb", closefd=False) as file:
                yield file
                file.flush()
            os.fsync(descriptor)
            staged.rename(target)
            sync_directory(target.parent)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

"""Drafts of files, apart for each epoch: a rank that was given up cannot rename any more."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

PREFIX = ".epoch-"
_TRIES = 10


class EpochDrafts:
    """The folder for the drafts of an epoch: FOLDER/.epoch-N/N, or FOLDER before the first epoch.

    A file gets its final name by a rename out of the folder. An epoch begins with a rename of
    `.epoch-N` and with the removal of all earlier drafts. So a rename by a rank of an earlier epoch
    raises FileNotFoundError, however late the rank wakes. Such a rank cannot make the folder again:
    the writer of an epoch alone makes folders, in `begin`.

    `.epoch-N` is renamed, not made anew: of two writers only one succeeds. The folder N within is
    made anew, since NFS may remember a renamed folder for a while, but no removed folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.epoch: int | None = None
        """The epoch of this rank's drafts, `None` before the first epoch."""

    @property
    def path(self) -> Path:
        """The folder for drafts. Exists once the writer has called `begin`."""
        return self._folder if self.epoch is None else self._of(self.epoch) / str(self.epoch)

    def begin(self, epoch: int) -> None:
        """Begin an epoch, and end all earlier epochs; called by the only writer of the epoch.

        Raises FileNotFoundError if a later epoch has begun, and OSError.
        """
        own = self._of(epoch)
        for _ in range(_TRIES):
            begun = {_epoch_of(path): path for path in left_in(self._folder)}
            if max(begun, default=epoch) > epoch:
                raise FileNotFoundError(errno.ENOENT, "a later epoch has begun", str(own))
            if not begun:
                own.mkdir(exist_ok=True)
            elif epoch not in begun:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(begun[max(begun)], own)
            if own.is_dir():
                break
        for path in own.iterdir():
            _remove(path)
        for path in left_in(self._folder):
            if _epoch_of(path) > epoch:  # begun while this rank stood still
                with contextlib.suppress(OSError):
                    own.rmdir()
                raise FileNotFoundError(errno.ENOENT, "a later epoch has begun", str(own))
            if path != own:
                _remove(path)
        self.epoch = epoch
        self.path.mkdir()

    def end(self) -> None:
        """Remove the folder, if empty; drafts of this rank lie in FOLDER again."""
        if self.epoch is not None:
            with contextlib.suppress(OSError):
                self.path.rmdir()
                self.path.parent.rmdir()
            self.epoch = None

    def _of(self, epoch: int) -> Path:
        return self._folder / f"{PREFIX}{epoch}"


def _epoch_of(path: Path) -> int:
    return int(path.name[len(PREFIX) :])


def left_in(folder: Path) -> list[Path]:
    """The folders of epochs in a folder."""
    return [path for path in folder.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdigit()]


def _remove(path: Path) -> None:
    """Remove a folder or a file, though a rank of an earlier epoch may still be writing there."""
    for last in range(_TRIES):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            return
        except FileNotFoundError:
            return
        except OSError:
            if last == _TRIES - 1:
                raise

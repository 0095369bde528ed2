"""The file that a run has loaded, kept for a resume where the script saves over it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ecrm.errors import UsageError
from ecrm.opened_file import OpenedFile


def beside(path: Path) -> Path:
    """The hidden name of the file that a run has begun with, next to its successor."""
    return path.with_name(f".{path.name}.begun")


def file_to_load(path: Path, resumes: bool) -> Path:
    """The file to be opened: with `resumes`, the one of before where the script has saved over it.

    It may be there of another run, too: a resume compares what rows begin with.
    """
    return beside(path) if resumes and beside(path).exists() else path


def keep(path: Path, opened: OpenedFile) -> None:
    """Keep the file that was opened under another name, where `path` is that file.

    Raises UsageError where its file system has no second names for a file.
    """
    try:
        found = os.stat(path)
    except OSError:
        return
    if (found.st_dev, found.st_ino) != opened.known[:2]:
        return
    with contextlib.suppress(FileNotFoundError):
        beside(path).unlink()
    try:
        os.link(path, beside(path))
    except OSError as error:
        raise UsageError(
            f"{path}: the run has begun with this file, and reads it ({error.strerror})",
            otherwise="save under another name",
        ) from None


def forget(path: Path) -> None:
    """The run is complete: nobody goes on with it."""
    with contextlib.suppress(OSError):
        beside(path).unlink()

"""The file that a run has loaded, kept for a resume where the script saves over it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ecrm.base.opened_file import OpenedFile
from ecrm.errors import UsageError
from ecrm.run.auto_resume import AUTO_RESUME, EVENTS, gone_on_from
from ecrm.transport.digests import words_digest


@dataclass(frozen=True)
class BegunFile:
    """A file that a run has loaded, by its `named` path, and where it is kept.

    Each run has a hidden second name of its own for the file, beside it. `own` is that of this run,
    and `before` are those of the runs that it goes on from.
    """

    named: Path
    own: Path
    before: Sequence[Path] = ()

    @staticmethod
    def of(path: Path, run_dir: Path, resume: Path | None) -> BegunFile:
        """The file at a path, for a run in a folder that was started with this `resume`."""
        named = path.resolve()
        from_ = gone_on_from(run_dir) if resume == AUTO_RESUME else resume
        runs = [] if from_ is None else [run_dir, _run_of(from_)]
        own, *before = (_beside(named, run) for run in (run_dir, *runs))
        return BegunFile(named, own, before)

    def to_load(self) -> Path:
        """The file to be opened: that of before, where a run goes on and has saved over it.

        A new run forgets what one before it has left in the same folder.
        """
        if not self.before:
            self.forget()
        for kept in self.before:
            if kept.exists():
                with contextlib.suppress(OSError):  # another rank has made it, or nobody can
                    os.link(kept, self.own)
                return kept
        return self.named

    def keep(self, target: Path, opened: OpenedFile) -> None:
        """Keep the file that was opened, where it is about to be replaced at `target`.

        Raises UsageError where its file system has no second names for a file.
        """
        try:
            found = os.stat(target)
        except OSError:
            return
        if (found.st_dev, found.st_ino) != opened.known[:2]:
            return
        self.forget()
        try:
            os.link(target.resolve(), self.own)
        except OSError as error:
            raise UsageError(
                f"{target}: the run has begun with this file, and reads it ({error.strerror})",
                otherwise="save under another name",
            ) from None

    def forget(self) -> None:
        """The run is complete, or begins anew: nobody goes on with its file."""
        with contextlib.suppress(OSError):
            self.own.unlink()


def _beside(path: Path, run: Path) -> Path:
    """The hidden name of a file that the run in a folder has begun with."""
    return path.with_name(f".{path.name}.begun-{words_digest(str(run.resolve())):016x}")


def _run_of(path: Path) -> Path:
    """The folder of the run that a checkpoint, mapped files, or the folder itself belong to."""
    path = path.absolute()
    return next((each for each in (path, *path.parents) if (each / EVENTS).exists()), path)

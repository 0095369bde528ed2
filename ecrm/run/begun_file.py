"""The file loaded by a run, kept for a resume if the script saves over the file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ecrm.base.errors import UsageError
from ecrm.base.opened_file import OpenedFile
from ecrm.run.auto_resume import AUTO_RESUME, EVENTS, gone_on_from
from ecrm.transport.digests import words_digest


@dataclass(frozen=True)
class BegunFile:
    """A file loaded by a run: the `named` path, and the hidden names keeping the content.

    Every run has a hidden second name for the file, in the same folder. `own` is the hidden name
    of this run. `before` are the hidden names of the runs to go on from. `opened` is the file as
    opened by this rank.
    """

    named: Path
    own: Path
    before: Sequence[Path] = ()
    opened: OpenedFile | None = None

    @staticmethod
    def of(path: Path, run_dir: Path, resume: Path | None) -> BegunFile:
        """The file at `path`, for a run in `run_dir` started with `resume`."""
        named = path.resolve()
        from_ = gone_on_from(run_dir) if resume == AUTO_RESUME else resume
        runs = [] if from_ is None else [run_dir, _run_of(from_)]
        own, *before = (_beside(named, run) for run in (run_dir, *runs))
        return BegunFile(named, own, before)

    def to_load(self) -> Path:
        """Return the file to open: the kept file if a run goes on and has saved over `named`.

        A new run first removes the hidden name left by an earlier run in the same folder.
        """
        if not self.before:
            self.forget()
        for kept in self.before:
            if kept.exists():
                with contextlib.suppress(OSError):  # a peer rank has made the link, or links fail
                    os.link(kept, self.own)
                return kept
        return self.named

    def keep(self, target: Path) -> None:
        """Keep the opened file under the name `own` if a save at `target` is about to replace it.

        Raises UsageError if the second name cannot be made, as on a file system without links.
        """
        try:
            found = os.stat(target)
        except OSError:
            return
        if self.opened is None or (found.st_dev, found.st_ino) != self.opened.known[:2]:
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
        """Remove the name `own`: the run is complete or begins anew, so no run needs the file."""
        with contextlib.suppress(OSError):
            self.own.unlink()


def _beside(path: Path, run: Path) -> Path:
    """The hidden name, for the run in the folder `run`, of the file at `path`."""
    return path.with_name(f".{path.name}.begun-{words_digest(str(run.resolve())):016x}")


def _run_of(path: Path) -> Path:
    """The run folder of a checkpoint or of mapped files; a run folder itself; else `path`."""
    path = path.absolute()
    return next((each for each in (path, *path.parents) if (each / EVENTS).exists()), path)

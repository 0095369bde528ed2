"""The rank of a run that this process is, where a user's script is run in it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Protocol

from ecrm.config.script import Script
from ecrm.engine.engine import Engine
from ecrm.engine.slot_faults import Place
from ecrm.errors import UsageError
from ecrm.process.calls import Calls
from ecrm.process.stop_signals import StopSignals
from ecrm.rank.claim import Job
from ecrm.run.auto_resume import AUTO_RESUME, gone_on_from
from ecrm.run.session_folders import session_folder
from ecrm.session.begun_file import BegunFile
from ecrm.transport.base import Transport

WITHOUT_GROUPS = "leave out process groups, for a session has ranks of its own"


class Part(Protocol):
    """One rank's part in a run that is built: what the end of the script needs of it."""

    @property
    def engine(self) -> Engine:
        """This rank's engine."""

    @property
    def steps_left(self) -> int:
        """How many steps are not trained yet."""

    def over(self) -> None:
        """The script has ended, and its run, in whatever way."""

    def end(self) -> int:
        """Collective, once the script has ended on this rank: end the run; returns its exit code.

        Raises an EcrmError, on every rank, where the run cannot end well.
        """


@dataclass
class ThisRank:
    """What a rank was started with, and how far its script has come.

    - `calls`: those to other ranks, for the guard.
    - `met`: whether all ranks have come to a Session, or to the end of their scripts.
    - `part`: the run that the Session has built, None before.
    - `place`: where in the training the script is, such as "step 7, slot 1"; "" for nowhere. In a
      slot, or in a batch of an evaluation, it is a `Place`.
    - `begun`: the files that the script has loaded.
    - `number`: the session that trains, the script's first being number 1.
    - `held`: the folders of the sessions before, which belong to this run until its end.
    """

    transport: Transport
    job: Job
    script: Script
    stop: StopSignals
    calls: Calls
    met: bool = False
    part: Part | None = None
    place: Place | str = ""
    begun: list[BegunFile] = field(default_factory=list)
    number: int = 1
    held: list[object] = field(default_factory=list)

    def job_of(self, number: int) -> Job:
        """The job of one of the script's sessions. `--kill` and `--init-from` are the first's."""
        job = self.job
        if job.run_dir is not None:
            begun = session_folder(job.run_dir, number + 1).is_dir()
            job = replace(job, run_dir=session_folder(job.run_dir, number), is_through=begun)
        if number == 1:
            return job
        resume = job.resume
        if resume not in (None, AUTO_RESUME):
            before = session_folder(resume, number)
            resume = before if gone_on_from(before) is not None else None
        return replace(job, resume=resume, kills=(), init_from=None)

    @property
    def next_job(self) -> Job:
        """The job of the session that is the next to train."""
        return self.job_of(self.number + (self.part is not None))

    @property
    def unfinished(self) -> str:
        """Why the session that trains is not through, as a sentence; "" if it is."""
        if self.place:
            return (
                f"{self.script.path} has left a loop in {self.place}: let loops over session.steps "
                "and session.eval_batches run to their end; to end training early, call "
                "session.stop() in the loop's body, and leave out break"
            )
        if self.part is not None and self.part.steps_left:
            return (
                f"{self.script.path} has ended {self.part.steps_left} steps before its training: "
                "let the loop over session.steps run to its end; to end training early, call "
                "session.stop() in the loop's body"
            )
        return ""


_this: list[ThisRank] = []


def be(rank: ThisRank) -> None:
    """Make this process that rank; at most once."""
    assert not _this, "a process is one rank"
    _this.append(rank)


def is_rank() -> bool:
    """Whether ecrm has started this process as a rank."""
    return bool(_this)


def this_rank() -> ThisRank:
    """The rank that this process is. Raises UsageError where ecrm has not started it."""
    if not _this:
        raise UsageError(f"this script was started without ecrm: type ecrm launch {script_name()}")
    return _this[0]


def script_name() -> str:
    """The script that Python runs, as one may type it; a stand-in in a notebook."""
    in_notebook = not hasattr(sys.modules["__main__"], "__file__")
    return "SCRIPT.py" if in_notebook or not sys.argv[0].endswith(".py") else sys.argv[0]

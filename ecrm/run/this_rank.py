"""The rank of the present process, for a user's script in the process."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ecrm.base.errors import UsageError
from ecrm.config.script import Script
from ecrm.engine.engine import Engine
from ecrm.process.calls import CallCount
from ecrm.process.stop_signals import StopSignals
from ecrm.run.auto_resume import AUTO_RESUME, gone_on_from
from ecrm.run.begun_file import BegunFile
from ecrm.run.session_folders import session_folder
from ecrm.run.slot_faults import Place
from ecrm.run.spec import RunSpec
from ecrm.transport.base import Transport

WITHOUT_GROUPS = "leave out process groups, for a session has ranks of its own"


class RankPart(Protocol):
    """A rank's part in a built run, as needed at the end of the script."""

    @property
    def engine(self) -> Engine:
        """The engine of the rank."""

    @property
    def steps_left(self) -> int:
        """The number of steps not trained yet."""

    def over(self) -> None:
        """Note the end of the script and its run, for any reason."""

    def end(self, sessions: int | None = None) -> int:
        """Collective: end the run; returns the exit code.

        `sessions` is the number of the script's sessions once the script has ended on the rank,
        `None` before another session.

        Raises an EcrmError, on every rank, if the run cannot end well.
        """


@dataclass
class ThisRank:
    """The start values of a rank, and the progress of its script.

    - `calls`: the calls to other ranks, for the guard.
    - `met`: whether all ranks have reached a Session, or the end of their scripts.
    - `part`: the run built by the Session, `None` before.
    - `place`: the script's place in the training, such as "step 7, slot 1"; "" outside. In a slot,
      or in a batch of an evaluation, a `Place`.
    - `begun`: the files loaded by the script.
    - `number`: the number of the training session, 1 for the script's first session.
    - `held`: the holds on the folders of earlier sessions, kept until the run ends.
    """

    transport: Transport
    spec: RunSpec
    stop: StopSignals
    calls: CallCount
    met: bool = False
    part: RankPart | None = None
    place: Place | str = ""
    begun: list[BegunFile] = field(default_factory=list)
    number: int = 1
    held: list[object] = field(default_factory=list)

    @property
    def script(self) -> Script:
        """The script that trains."""
        return self.spec.script

    def spec_of(self, number: int) -> RunSpec:
        """The spec of one of the script's sessions. `--kill` and `--init-from` are the first's."""
        spec = self.spec
        if spec.run_dir is not None:
            begun = session_folder(spec.run_dir, number + 1).is_dir()
            spec = replace(spec, run_dir=session_folder(spec.run_dir, number), is_through=begun)
        if number == 1:
            return spec
        if spec.config.mapped.path:
            files = session_folder(Path(spec.config.mapped.path), number)
            mapped = replace(spec.config.mapped, path=str(files))
            spec = replace(spec, config=replace(spec.config, mapped=mapped))
        resume = spec.resume
        if resume not in (None, AUTO_RESUME):
            before = session_folder(resume, number)
            resume = before if gone_on_from(before) is not None else None
        return replace(spec, resume=resume, kills=(), init_from=None)

    @property
    def next_spec(self) -> RunSpec:
        """The spec of the session that is the next to train."""
        return self.spec_of(self.number + (self.part is not None))

    @property
    def unfinished(self) -> str:
        """Why the session that trains is not through, as a sentence; "" if it is."""
        if self.place:
            return (
                f"{self.script.typed} has left a loop in {self.place}: let loops over "
                "session.steps and session.eval_batches run to their end; to end training early, "
                "call session.stop() in the loop's body, and leave out break"
            )
        if self.part is not None and self.part.steps_left:
            return (
                f"{self.script.typed} has ended {self.part.steps_left} steps before its training: "
                "let the loop over session.steps run to its end; to end training early, call "
                "session.stop() in the loop's body"
            )
        return ""


_this: list[ThisRank] = []


def be(rank: ThisRank) -> None:
    """Make the present process a rank; at most once."""
    assert not _this, "a process is one rank"
    _this.append(rank)


def is_rank() -> bool:
    """Whether ecrm has started the process as a rank."""
    return bool(_this)


def this_rank() -> ThisRank:
    """The rank of the process. Raises UsageError for a process not started by ecrm."""
    if not _this:
        raise UsageError(f"this script was started without ecrm: type ecrm launch {script_name()}")
    return _this[0]


def script_name() -> str:
    """The script run by Python, as typed by the user; "SCRIPT.py" in a notebook."""
    in_notebook = not hasattr(sys.modules["__main__"], "__file__")
    return "SCRIPT.py" if in_notebook or not sys.argv[0].endswith(".py") else sys.argv[0]

"""The rank of the present process, for a user's script in the process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol

from ecrm.config.script import Script
from ecrm.engine.engine import Engine
from ecrm.engine.slot_faults import Place
from ecrm.errors import UsageError
from ecrm.process.calls import Calls
from ecrm.process.stop_signals import StopSignals
from ecrm.rank.claim import Job
from ecrm.session.begun_file import BegunFile
from ecrm.transport.base import Transport

WITHOUT_GROUPS = "leave out process groups, for a session has ranks of its own"


class Part(Protocol):
    """A rank's part in a built run, as needed at the end of the script."""

    @property
    def engine(self) -> Engine:
        """The engine of the rank."""

    @property
    def steps_left(self) -> int:
        """The number of steps not trained yet."""

    def over(self) -> None:
        """Note the end of the script and its run, for any reason."""

    def end(self) -> int:
        """Collective, once the script has ended on the rank: end the run; returns the exit code.

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
    - `begun`: the file loaded by the script; `None` without a file.
    """

    transport: Transport
    job: Job
    script: Script
    stop: StopSignals
    calls: Calls
    met: bool = False
    part: Part | None = None
    place: Place | str = ""
    begun: BegunFile | None = None


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

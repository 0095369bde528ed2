"""The rank of a run that this process is, where a user's script is run in it."""

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
    - `begun`: the file that the script has loaded; None for none.
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

"""What a simulated run leaves, and the ways in which it can break off."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from ecrm.transport.simulated.fault_plan import Fault, PhaseFault

Result = TypeVar("Result")


class RankKilled(BaseException):
    """Unwinds the thread of a killed rank; a program must let it pass."""


class Event(NamedTuple):
    """One thing that a rank did. Their list is the whole schedule: equal lists, equal runs."""

    rank: int
    call_index: int
    method: str
    what: str

    def __str__(self) -> str:
        return f"rank {self.rank} call {self.call_index} {self.method}: {self.what}"


class Kill(NamedTuple):
    """Where a rank died: in call number `call_index`, or after it at the phase `when`."""

    rank: int
    call_index: int
    method: str
    when: str


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """How a simulated run ended.

    Results by surviving rank, deaths in order, calls of all ranks together, and given faults that
    did not fire.
    """

    results: dict[int, Result]
    killed: list[Kill]
    calls: int
    trace: list[Event]
    unfired: list[Fault | PhaseFault]


class SimulationError(Exception):
    """The run broke off; `trace` tells what happened until then."""

    def __init__(self, message: str, trace: list[Event]) -> None:
        super().__init__(message)
        self.trace = trace


class SimulationDeadlock(SimulationError):
    """All ranks wait, and nobody will ever wake them."""


class SimulationMismatch(SimulationError):
    """Ranks made different calls at the same place."""


class SimulationTooLong(SimulationError):
    """More calls than allowed."""


class ProgramFailed(SimulationError):
    """Programs ended with an exception.

    `errors` are by rank, the first one first; `outcome` is that of the other ranks.

    The message has the first one's traceback. To the other ranks it is dead, so theirs may only be
    consequences.
    """

    def __init__(self, outcome: Outcome[Any], errors: dict[int, BaseException]) -> None:
        (rank, first), *others = errors.items()
        told = [f"first rank {rank}:\n", *traceback.format_exception(first)]
        told += [f"later rank {rank}: {type(error).__name__}: {error}\n" for rank, error in others]
        super().__init__("".join(told), outcome.trace)
        self.outcome = outcome
        self.errors = errors

"""The outcome of a simulated run, and the ways in which a run can break off."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from ecrm.testing.simulated_transport.fault_plan import Fault, PhaseFault

Result = TypeVar("Result")


class RankKilled(BaseException):
    """Unwinds the thread of a killed rank; a program must let RankKilled pass."""


class Event(NamedTuple):
    """An act of a rank. The list of events is the whole schedule: equal lists, equal runs."""

    rank: int
    call_index: int
    method: str
    what: str

    def __str__(self) -> str:
        return f"rank {self.rank} call {self.call_index} {self.method}: {self.what}"


class Kill(NamedTuple):
    """The place of a rank's death: in call number `call_index`, or after it at phase `when`."""

    rank: int
    call_index: int
    method: str
    when: str


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """The end of a simulated run.

    Results by surviving rank, deaths in order, the number of calls of all ranks together, the
    events in order, and given faults that did not fire.
    """

    results: dict[int, Result]
    killed: list[Kill]
    calls: int
    trace: list[Event]
    unfired: list[Fault | PhaseFault]


class SimulationError(Exception):
    """The run broke off; `trace` holds the events until then."""

    def __init__(self, message: str, trace: list[Event]) -> None:
        super().__init__(message)
        self.trace = trace


class SimulationDeadlock(SimulationError):
    """All ranks wait, and no event can wake a rank."""


class SimulationMismatch(SimulationError):
    """Ranks made different calls at the same place."""


class SimulationTooLong(SimulationError):
    """More calls than allowed."""


class ProgramFailed(SimulationError):
    """Programs ended with an exception.

    `errors` are by rank, the first error first; `outcome` is the outcome of the other ranks.

    The message has the first error's traceback. The failed rank is dead to the others: later errors
    may only be consequences.
    """

    def __init__(self, outcome: Outcome[Any], errors: dict[int, BaseException]) -> None:
        (rank, first), *others = errors.items()
        told = [f"first rank {rank}:\n", *traceback.format_exception(first)]
        told += [f"later rank {rank}: {type(error).__name__}: {error}\n" for rank, error in others]
        super().__init__("".join(told), outcome.trace)
        self.outcome = outcome
        self.errors = errors

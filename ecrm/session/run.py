"""What a session needs of the run that it is part of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ecrm.engine.dense import DenseReplica
from ecrm.engine.engine import Engine
from ecrm.errors import Unrecoverable
from ecrm.placement.tables import Table


@dataclass(frozen=True)
class Wanted:
    """What a session asks a run for.

    - `tables`: all embedding tables of the model, by their qualified names.
    - `make_dense`: makes this rank's replica of everything else.
    - `slots`: how many parts a step's samples come in. `seed`: of rows that no step has updated.
    - `steps`: how many steps are trained in all.
    - `sparse_rate`: a factor on the learning rates of rows, by step; None for 1.
    """

    tables: Sequence[Table]
    make_dense: Callable[[], DenseReplica]
    slots: int
    seed: int
    steps: int
    sparse_rate: Callable[[int], float] | None


class Run(Protocol):
    """One rank's part in a run. Every live rank calls the same methods in the same order.

    All but `engine` may raise StepAborted after a failure, and StopAgreed.
    """

    @property
    def engine(self) -> Engine:
        """This rank's engine."""

    def between_steps(self) -> None:
        """Collective, before a step: what is due, such as a checkpoint."""

    def doing(self, place: str) -> None:
        """The user's code begins on something, such as "step 7, slot 1"; "" once it is through."""

    def logged(self, step: int, by_slot: Mapping[int, Mapping[str, float]]) -> None:
        """What slots have logged in a committed step; each step once, and in order."""

    def worth_saying(self, step: int, troubles: dict[int, str]) -> dict[int, str]:
        """The part of what slots have in trouble in a step that all ranks must know."""

    def restart_clock(self) -> None:
        """The time since the last step belongs to no step."""

    def step_finished(self) -> None:
        """A step is done on this rank: count it, and tell when that is due."""

    def steps_done(self) -> None:
        """Collective, after the last step: see to it that a failure undoes no step any more."""

    def went_back(self) -> None:
        """A recovery is through: steps may have been undone."""

    def stop(self) -> None:
        """Collective, at a commit: end the run on all ranks since one has asked for that.

        Does not return, unless by StepAborted or StopAgreed.
        """


def too_late(engine: Engine, trained: int) -> Unrecoverable:
    """Why a script cannot go on: its loop is over, and a failure has undone steps of it."""
    return Unrecoverable(
        f"after the script's loop all ranks have rolled back from step {trained} to "
        f"step {engine.step}: start the run again with --resume auto"
    )


Start = Callable[[Wanted], Run]
"""Collective: this rank's part in a run, with initial tables or those that the run goes on with."""

"""What a session asks for, and the run that it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ecrm.base.allocate import CPU
from ecrm.engine.dense import DenseReplica
from ecrm.engine.engine import Engine
from ecrm.engine.slot_faults import Place
from ecrm.errors import Unrecoverable
from ecrm.placement.tables import Table
from ecrm.rank.step_loop import Run
from ecrm.session.log_delivery import Mark, NoMark


@dataclass(frozen=True)
class Wanted:
    """What a session asks a run for.

    - `tables`: all embedding tables of the model, by their qualified names.
    - `make_dense`: makes this rank's replica of everything else.
    - `slots`: how many parts a step's samples come in. `seed`: of rows that no step has updated.
    - `steps`: how many steps are trained in all.
    - `sparse_rate`: a factor on the learning rates of rows, by step; None for 1.
    - `open_end`: whether the data may end before that, nobody knows when.
    - `check_steps`: as `Started.check_steps`, wanted by the script.
    - `device`: where the module is trained.
    - `keeps_best`: whether the best model is kept, by values that the script reports.
    """

    tables: Sequence[Table]
    make_dense: Callable[[], DenseReplica]
    slots: int
    seed: int
    steps: int
    sparse_rate: Callable[[int], float] | None
    check_steps: int = 0
    open_end: bool = False
    device: torch.device = CPU
    keeps_best: bool = False


def _ignore(*_: object) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class Started:
    """One rank's part in a run that has begun, and whom the session tells of what it does.

    - `doing(place)`: the user's code begins on a slot or a batch, or on something else in words; ""
      once it is through.
    - `logged(step, {slot: {name: value}})`: what slots have logged in a committed step, each step
      once and in order.
    - `check_steps`: of so many steps each slot is computed twice, to see whether the bits are the
      same.
    - `mark`: how far the main rank has told the script of commits.
    - `finite`: whether a model that is not finite is refused where it is saved.
    """

    run: Run
    doing: Callable[[Place | str], None] = _ignore
    logged: Callable[[int, Mapping[int, Mapping[str, float]]], None] = _ignore
    check_steps: int = 0
    finite: bool = True
    mark: Mark = field(default_factory=NoMark)


def too_late(engine: Engine, trained: int) -> Unrecoverable:
    """Why a script cannot go on: its loop is over, and a failure has undone steps of it."""
    return Unrecoverable(
        f"after the script's loop all ranks have rolled back from step {trained} to "
        f"step {engine.step}: start the run again with --resume auto"
    )


Start = Callable[[Wanted], Started]
"""Collective: this rank's part in a run, with initial tables or those that the run goes on with."""

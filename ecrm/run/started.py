"""The request of a session for a run, and the run given to the session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ecrm.base.allocate import CPU
from ecrm.base.errors import Unrecoverable
from ecrm.engine.dense import DenseReplica
from ecrm.engine.engine import Engine
from ecrm.placement.tables import Table
from ecrm.run.log_delivery import DeliveryMark, NoMark
from ecrm.run.slot_faults import Place
from ecrm.run.step_loop import Run


@dataclass(frozen=True)
class Wanted:
    """The request of a session for a run.

    - `tables`: all embedding tables of the model, by their qualified names.
    - `make_dense`: makes the rank's replica of the rest of the model.
    - `slots`: the number of parts of a step's samples. `seed`: the seed of rows never updated by a
      step.
    - `steps`: the total number of steps to train.
    - `sparse_rate`: a factor on the learning rates of rows, by step; `None` for 1.
    - `open_end`: whether the data may end before `steps`, at an unknown step.
    - `check_steps`: as `Started.check_steps`, wanted by the script.
    - `device`: the device of the module.
    - `keeps_best`: whether the best model is kept, by values reported by the script.
    - `samples`: the number of samples in a step, 0 if unknown.
    - `wire_dtype`: the dtype that rows and gradients of rows are rounded to.
    - `first_rows()`: the numbers of distinct rows looked up by step 0, by row space.
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
    samples: int = 0
    wire_dtype: torch.dtype = torch.float32
    first_rows: Callable[[], Sequence[int]] = tuple


def _ignore(*_: object) -> None:
    """Ignore the arguments."""


@dataclass(frozen=True)
class Started:
    """One rank's part in a begun run, with the callbacks for the session.

    - `doing(place)`: the user's code begins on a slot or a batch, or on other work in words; ""
      once the code is through.
    - `check_steps`: the number of steps with each slot computed twice, to compare the bits.
    - `mark`: how far the main rank has told the script of commits.
    - `number`: the number of the session in the script, the first being 1.
    - `finite`: whether saving a nonfinite model is refused.
    - `steps`: the number of steps; `None` for the wanted number.
    - `data_began`: the step at which the data of a config's run began.
    """

    run: Run
    doing: Callable[[Place | str], None] = _ignore
    check_steps: int = 0
    finite: bool = True
    mark: DeliveryMark = field(default_factory=NoMark)
    number: int = 1
    steps: int | None = None
    data_began: int = 0


def too_late(engine: Engine, trained: int) -> Unrecoverable:
    """The error for a failure undoing steps after the end of the script's loop."""
    return Unrecoverable(
        f"after the script's loop all ranks have rolled back from step {trained} to "
        f"step {engine.step}: start the run again with --resume auto"
    )


Start = Callable[[Wanted], Started]
"""Collective: the rank's part in a run, with initial tables or the tables of a continued run."""

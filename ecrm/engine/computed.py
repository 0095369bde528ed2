"""Results of slots in a step, so a failure costs no second forward and backward pass."""

from __future__ import annotations

from typing import TypeVar

from ecrm.engine.engine import Engine

Result = TypeVar("Result")


class Computed(dict[int, Result]):
    """Results of slots of the step under way, by slot.

    A slot run again gives the same bits from the same step, rows and dense replica. So the results
    of a survivor hold, if lost rows come back exactly, and if an agreement has confirmed the rows
    behind the results.
    """

    def __init__(self) -> None:
        self._step = -1

    def begin(self, engine: Engine) -> None:
        """Before a step's lookup: keep the results if the engine does the same step again."""
        if engine.step != self._step or not engine.confirmed or not engine.state.protection.exact:
            self.clear()
        self._step = engine.step

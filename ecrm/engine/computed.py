"""What slots have computed in a step, so that a failure costs no second forward and backward."""

from __future__ import annotations

from typing import TypeVar

from ecrm.engine.engine import Engine

Result = TypeVar("Result")


class Computed(dict[int, Result]):
    """Results of slots of the step that is under way, by slot.

    Whoever runs a slot again gets the same bits from the same step, rows and dense replica; so what
    a rank that lives on had computed holds, wherever lost rows come back exactly, and where the
    rows it was computed from are known to be those that were sent.
    """

    def __init__(self) -> None:
        self._step = -1

    def begin(self, engine: Engine) -> None:
        """Before a step's lookup: keep the results if the engine does the same step again."""
        if engine.step != self._step or not engine.confirmed or not engine.state.protection.exact:
            self.clear()
        self._step = engine.step

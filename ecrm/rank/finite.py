"""What becomes of a run whose loss, or whose state, is NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ecrm.errors import NotFinite

REMEDY = "lower train.sparse_lr or train.dense_lr"
"""What helps in the built-in trainer."""


class FiniteWatch:
    """Receives on every rank what is not finite, the same on all ranks.

    It ends the run (`stop`), or tells of it once in `window` steps.

    `tell(fields)` gets the event; `kept()` is the step of the newest checkpoint, 0 without any.
    `remedy` is what a person may do about it.
    """

    def __init__(
        self,
        stop: bool,
        window: int,
        tell: Callable[[dict[str, Any]], None],
        kept: Callable[[], int] = lambda: 0,
        remedy: str = REMEDY,
    ) -> None:
        self._stop, self._window, self._tell, self._kept = stop, window, tell, kept
        self._quiet_until, self._remedy = 0, remedy

    def worth_saying(self, step: int, troubles: dict[int, str]) -> dict[int, str]:
        """The part of this rank's `troubles` in a step that all must know.

        That is none twice in a window.
        """
        return troubles if step >= self._quiet_until else {}

    def losses(self, step: int, where: Mapping[int, str]) -> None:
        """The losses of slots in a step are not finite; `where` says where that began, by slot.

        Raises NotFinite where that ends the run.
        """
        slot, began = min(where.items())
        why = f"the loss of step {step} is not finite: in slot {slot} it began {began}"
        self._heard("step", step, slot, why, began)
        self._quiet_until = (step // self._window + 1) * self._window

    def evaluation(self, step: int, slot: int, began: str) -> None:
        """The same of the log loss of an evaluation after `step` steps."""
        why = (
            f"the log loss of the evaluation at step {step} is not finite: "
            f"in slot {slot} it began {began}"
        )
        self._heard("evaluation", step, slot, why, began)

    def checkpoint(self, step: int, why: str) -> None:
        """A checkpoint of `step` was not written since it would hold what is not finite."""
        if self._stop:
            self._end(f"no checkpoint of step {step}: {why}")

    def _heard(self, found_in: str, step: int, slot: int, why: str, began: str) -> None:
        if self._stop:
            self._end(why)
        fields = {"step": step, "found_in": found_in, "slot": slot, "where": began, "why": why}
        self._tell({"event": "not_finite", **fields})

    def _end(self, why: str) -> None:
        kept = self._kept()
        raise NotFinite(
            f"{why}; {self._remedy}"
            + (f"; the checkpoint of step {kept}, which is finite, is kept" if kept else "")
        )

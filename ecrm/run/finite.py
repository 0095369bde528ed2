"""Handling of a nonfinite loss or state: a NaN or an infinity."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

from ecrm.base import errors
from ecrm.engine.events import Event, NotFinite

MOST_SKIPPED = 50
"""The most skipped steps in a row: a GradScaler starting at 2 ** 16 needs about 16."""
NO_SCALE = "with a loss scale of"
"""The first words of a slot's trouble if no scaling helps the gradients any more."""
REMEDY = "lower train.sparse_lr or train.dense_lr"
"""The remedy in a config's run."""


class FiniteWatch:
    """Receives news of nonfinite values on every rank, the same on all ranks.

    The watch ends the run (`stop`), or reports once in `window` steps.

    `tell(event)` gets the event; `kept()` is the step of the newest checkpoint, 0 without any.
    `remedy` is the advice to a person about nonfinite values.
    """

    def __init__(
        self,
        stop: bool,
        window: int,
        tell: Callable[[Event], None],
        kept: Callable[[], int] = lambda: 0,
        remedy: str = REMEDY,
    ) -> None:
        self._stop, self._window, self._tell, self._kept = stop, window, tell, kept
        self._quiet_until, self._remedy = 0, remedy
        self._skipped: list[int] = []  # ascending; a step done again is skipped again

    def troubles_to_report(self, step: int, troubles: dict[int, str]) -> dict[int, str]:
        """The part of this rank's `troubles` in a step to report to every rank.

        No trouble is reported twice in a window.
        """
        return troubles if step >= self._quiet_until else {}

    def losses(self, step: int, where: Mapping[int, str]) -> None:
        """Note nonfinite losses of slots in a step; `where` has the first bad place, by slot.

        Raises NotFinite if the losses end the run.
        """
        slot, began = min(where.items())
        why = f"the loss of step {step} is not finite: in slot {slot} it began {began}"
        self._heard_of_step(step, slot, why, began)

    def skipped(self, step: int, where: Mapping[int, str]) -> None:
        """Note a step skipped because of a nonfinite gradient; `where` has the place, by slot.

        Raises NotFinite if the run ends: after too many skipped steps in a row, or if no scale
        helps any more.
        """
        self._skipped = [*self._skipped[: self.skipped_before(step)], step]
        slot, found = min(where.items())
        if found.startswith(NO_SCALE):
            why = f"slot {slot} computes step {step} {found}: no gradient is finite with that"
        elif self._skipped[-MOST_SKIPPED:] == list(range(step - MOST_SKIPPED + 1, step + 1)):
            why = (
                f"{MOST_SKIPPED} steps in a row were skipped, up to step {step}, since gradients "
                f"are not finite: in slot {slot} {found}"
            )
        else:
            return
        if self._stop or step >= self._quiet_until:
            self._heard_of_step(step, slot, why, found)

    def skipped_before(self, step: int) -> int:
        """The number of skipped steps before `step`, among the steps seen by this process."""
        return bisect_left(self._skipped, step)

    def _heard_of_step(self, step: int, slot: int, why: str, began: str) -> None:
        self._heard("step", step, slot, why, began)
        self._quiet_until = (step // self._window + 1) * self._window

    def checkpoint(self, step: int, why: str) -> None:
        """Note a checkpoint of `step` not written because of nonfinite values."""
        if self._stop:
            self._end(f"no checkpoint of step {step}: {why}")

    def _heard(self, found_in: str, step: int, slot: int, why: str, began: str) -> None:
        if self._stop:
            self._end(why)
        self._tell(NotFinite(step=step, found_in=found_in, slot=slot, where=began, why=why))

    def _end(self, why: str) -> None:
        kept = self._kept()
        raise errors.NotFinite(
            f"{why}; {self._remedy}"
            + (f"; the checkpoint of step {kept}, which is finite, is kept" if kept else "")
        )

"""What becomes of a run whose loss, or whose state, is NaN or infinite, and where that began."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ecrm.errors import NotFinite
from ecrm.model.slot_batch import SlotBatch
from ecrm.placement.tables import RowSpace

REMEDY = "lower train.sparse_lr or train.dense_lr"


class FiniteWatch:
    """Receives on every rank what is not finite, the same on all ranks.

    It ends the run (`stop`), or tells of it once in `window` steps.

    `tell(fields)` gets the event; `kept()` is the step of the newest checkpoint, 0 without any.
    """

    def __init__(
        self,
        stop: bool,
        window: int,
        tell: Callable[[dict[str, Any]], None],
        kept: Callable[[], int] = lambda: 0,
    ) -> None:
        self._stop, self._window, self._tell, self._kept = stop, window, tell, kept
        self._quiet_until = 0

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
            f"{why}; {REMEDY}"
            + (f"; the checkpoint of step {kept}, which is finite, is kept" if kept else "")
        )


def origin(module: nn.Module, batch: SlotBatch, values: Tensor, space: RowSpace) -> str:
    """What is not finite first in the forward of a slot, in words; changes nothing.

    `values` are the rows of the slot, [U, D].
    """
    bad = batch.rows[~values.isfinite().all(1)].tolist()
    if bad:
        return f"in {space.in_words(bad)}"
    for name, parameter in module.named_parameters():
        if not parameter.isfinite().all():
            return f"in parameter {name}"
    return _layer(module, batch, values) or "in the loss itself"


def _layer(module: nn.Module, batch: SlotBatch, values: Tensor) -> str:
    """The first layer whose output is not finite; empty where all are."""
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda layer, inputs, output: None if output.isfinite().all() else found.append(name)

    leaves = [(name, layer) for name, layer in module.named_modules() if not any(layer.children())]
    hooks = [layer.register_forward_hook(look(name)) for name, layer in leaves]
    try:
        with torch.no_grad():
            module(batch.dense, values, batch.places)
    finally:
        for hook in hooks:
            hook.remove()
    return f"in the output of layer {found[0]}" if found else ""

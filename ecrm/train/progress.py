"""Progress of the built-in trainer: loss and AUC of the steps since the last progress step.

Loss and AUC are of all slots, from the notes of slots on each step (`ecrm/engine/step_log.py`). So
both depend only on the finished steps, not on the reporter or on deaths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecrm.engine.engine import Engine
from ecrm.engine.step_log import StepLog
from ecrm.metrics import auc
from ecrm.run.progress import MOST_FINISHED, Measured, StepProgress, Tell, window_start

MOST_SCORED = 1 << 18
"""Most samples in the AUC of a progress step, but at least the samples of one step.

The limit bounds the memory of dense holders.
"""


def note_of(loss: Tensor, logits: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
    """A slot's note on a step, uint8 [N].

    The note holds the slot's share of the mean `loss`, float32 [1], and, if given, `logits`,
    float32 [B], and `labels`, [B], of the slot's B samples.
    """
    parts = [loss.view(torch.uint8)]
    if logits is not None and labels is not None:
        parts += [logits.view(torch.uint8), labels.to(torch.uint8)]
    return torch.cat(parts)


def read_note(note: Tensor) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss, logits and labels of a note; a note without scores gives empty logits and labels."""
    raw = note.numpy()
    scores = 4 + (len(raw) - 4) // 5 * 4
    return float(raw[:4].view(np.float32)[0]), raw[4:scores].view(np.float32), raw[scores:]


def measure(log: StepLog, first: int, step: int, look_back: int) -> dict[str, Any]:
    """Measures of the steps from `first` up to `step`, without `step`, as far as in the log.

    `loss` is the mean log loss of the steps found, `window` the number of steps found, and `auc`
    the AUC of the last `look_back` steps.
    """
    losses, logits, labels = [], [], []
    for known in range(first, step):
        notes = [read_note(note) for note in log.of(known).values()]
        if notes:
            losses.append(sum(loss for loss, *_ in notes))
        if known >= step - look_back:
            logits += [scores for _, scores, _ in notes]
            labels += [truth for *_, truth in notes]
    return {
        "loss": sum(losses) / len(losses) if losses else None,
        "auc": auc(np.concatenate(labels), np.concatenate(logits)) if labels else None,
        "window": len(losses),
    }


class Progress(StepProgress):
    """The progress of `steps` steps of `global_batch` samples."""

    def __init__(self, steps: int, global_batch: int, every: int, tell: Tell) -> None:
        super().__init__(steps, every, tell)
        self._global_batch = global_batch
        self._look_back = max(1, MOST_SCORED // global_batch)

    def note(self, step: int, loss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """A slot's note on a step, as from `note_of`.

        The note has no scores if no AUC will look back on the step.
        """
        soonest = [window_start(step + 1, self._every) + MOST_FINISHED, self._steps]
        if self._every:
            soonest.append(step - step % self._every + self._every)
        return (
            note_of(loss, logits, labels)
            if min(soonest) - step <= self._look_back
            else note_of(loss)
        )

    def counted(self, step: int, steps_per_second: float) -> dict[str, Any]:
        return {
            "samples": step * self._global_batch,
            "samples_per_second": steps_per_second * self._global_batch,
        }

    def measured(self, engine: Engine, first: int) -> Measured:
        step = engine.step
        # a new dense holder gets a new log
        return lambda: measure(engine.state.log, first, step, self._look_back)

    def in_words(self, fields: dict[str, Any], window: int) -> str:
        loss, area = (
            "-" if value is None else f"{value:.4f}" for value in (fields["loss"], fields["auc"])
        )
        known = "" if fields["window"] == window else f" (of {fields['window']} of {window} steps)"
        return (
            f"step {fields['step']:>{len(str(self._steps))}}/{self._steps}  "
            f"{fields['samples_per_second']:>9,.0f} samples/s  "
            f"loss {loss}  auc {area}{known}  committed {fields['committed']}  "
            f"failures left {fields['failures_left']}  rebuilt {fields['rebuilt']:.0%}"
        )

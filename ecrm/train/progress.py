"""Progress: what a run tells every so many steps, and the times of steps.

Loss and AUC are those of all slots in the steps since the last progress step, made from the notes
that slots leave on each step (`ecrm/engine/step_log.py`). So they depend on the steps finished
alone, not on who reports or who died.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecrm.engine.engine import Engine
from ecrm.engine.step_log import StepLog
from ecrm.metrics import auc
from ecrm.train.reporter import KEPT_COMMITS

MOST_SCORED = 1 << 18
"""Most samples that the AUC of a progress step looks back on, though at least one step's.

It bounds what holders of the dense replica keep.
"""

MOST_FINISHED = 1000
"""Most steps between progress steps, however rarely a line is printed.

It bounds what a rank keeps, and what its death loses.
"""

Told = tuple[dict[str, Any], str]
"""The fields of a progress event, and its line, empty for none."""

Tell = Callable[[int, Callable[[], Told]], None]
"""See `Progress`."""


def window_start(step: int, every: int) -> int:
    """The last progress step before `step`, or 0.

    Progress steps are multiples of `every` (0: none) and, from each on, of MOST_FINISHED steps.
    """
    before = step - 1
    line = before - before % every if every else 0
    return line + (before - line) // MOST_FINISHED * MOST_FINISHED


def note_of(loss: Tensor, logits: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
    """A slot's note on a step, uint8 [N].

    It holds the slot's share of the mean `loss`, float32 [1]. Where they are given it also holds
    `logits`, float32 [B], and `labels`, [B], of its B samples.
    """
    parts = [loss.view(torch.uint8)]
    if logits is not None and labels is not None:
        parts += [logits.view(torch.uint8), labels.to(torch.uint8)]
    return torch.cat(parts)


def read_note(note: Tensor) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss, logits and labels of a note; both empty where it has none."""
    raw = note.numpy()
    scores = 4 + (len(raw) - 4) // 5 * 4
    return float(raw[:4].view(np.float32)[0]), raw[4:scores].view(np.float32), raw[scores:]


def measure(log: StepLog, first: int, step: int, look_back: int) -> dict[str, Any]:
    """Measures of the steps from `first` up to `step`, without it, as far as they are in the log.

    `loss` is the mean log loss of these steps, `window` their number, and `auc` the AUC of the last
    `look_back` of them.
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


class Progress:
    """Every rank keeps the times and, at progress steps and the last one, calls `tell(step, make)`.

    `make()`, on a holder of the dense replica, gives what is told. A line comes every `every` steps
    (0: only at the end), an event without a line every `MOST_FINISHED` steps.
    """

    def __init__(self, steps: int, global_batch: int, every: int, tell: Tell) -> None:
        self._steps, self._global_batch, self._every, self._tell = steps, global_batch, every, tell
        self._look_back = max(1, MOST_SCORED // global_batch)
        self.step_seconds: list[float] = []
        self._reported = self._forgotten = 0
        # commits by then, and the first step needed, of what may have to be told by another
        self._told: list[tuple[int, int]] = []
        self._last = self._window_start = time.monotonic()
        self._finished_at: list[tuple[int, float]] = []

    def restart_clock(self) -> None:
        """The time since the last step belongs to no step (start, evaluation)."""
        now = time.monotonic()
        self._window_start += now - self._last
        self._last = now

    def begins_at(self, engine: Engine) -> None:
        """The first step is the engine's next: not 0 in a run that goes on from a checkpoint."""
        self._reported = engine.step

    def went_back(self, engine: Engine) -> None:
        """Steps were undone, and are told when they are finished once more.

        Or this rank has only now learned that the last one is finished.
        """
        self._reported = min(self._reported, engine.step)
        self._forgotten = 0
        self._report_if_due(engine)

    def note(self, step: int, loss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """What a slot notes of a step, as `note_of` makes it.

        It has no scores where no AUC will look back on the step.
        """
        soonest = [window_start(step + 1, self._every) + MOST_FINISHED, self._steps]
        if self._every:
            soonest.append(step - step % self._every + self._every)
        return (
            note_of(loss, logits, labels)
            if min(soonest) - step <= self._look_back
            else note_of(loss)
        )

    def step_finished(self, engine: Engine) -> None:
        """Count a finished step; print and write when due."""
        now = time.monotonic()
        self.step_seconds.append(now - self._last)
        self._last = now
        self._finished_at.append((engine.step, time.time()))
        self._report_if_due(engine)
        self._forget(engine)

    def _is_due(self, step: int) -> bool:
        return step == self._steps or window_start(step + 1, self._every) == step

    def _report_if_due(self, engine: Engine) -> None:
        step = engine.step
        if step <= self._reported or not self._is_due(step):
            return
        first = window_start(step, self._every)
        fields = {
            "step": step,
            "samples": step * self._global_batch,
            "committed": engine.committed,
            "samples_per_second": len(self._finished_at)
            * self._global_batch
            / max(self._last - self._window_start, 1e-9),
            "failures_left": engine.state.failures_left,
            "rebuilt": engine.state.rebuild_fraction,
            "finished": self._finished_at,
        }
        self._told.append((engine.state.commits, first))
        self._tell(step, partial(self._made, engine, first, fields))
        self._reported, self._window_start, self._finished_at = step, self._last, []

    def _made(self, engine: Engine, first: int, fields: dict[str, Any]) -> Told:
        step = fields["step"]
        fields = {**fields, **measure(engine.state.log, first, step, self._look_back)}
        line = step == self._steps or (self._every and step % self._every == 0)
        return fields, self._in_words(fields, step - first) if line else ""

    def _in_words(self, fields: dict[str, Any], window: int) -> str:
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

    def _forget(self, engine: Engine) -> None:
        """Have the engine forget notes of steps that are not told, or told again, any more."""
        self._told = [
            (at, first) for at, first in self._told if at >= engine.state.commits - KEPT_COMMITS
        ]
        needed = min(
            [first for _, first in self._told] + [window_start(engine.committed + 1, self._every)]
        )
        if needed > self._forgotten:
            self._forgotten = needed
            engine.state.log.forget(needed)

    def quantiles(self) -> dict[str, float | None]:
        """Median, 99th percentile and maximum of the seconds a step took on this rank."""
        if not self.step_seconds:
            return {"p50": None, "p99": None, "max": None}
        seconds = np.array(self.step_seconds)
        return {
            "p50": float(np.quantile(seconds, 0.5)),
            "p99": float(np.quantile(seconds, 0.99)),
            "max": float(seconds.max()),
        }

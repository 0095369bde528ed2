"""Evaluation on the held-out split: slots score their shares, the reporter merges what they counted.

Memory does not grow with the split: each rank keeps one histogram of logits and one sum of losses per slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ecrm.data.dataset import CriteoDataset
from ecrm.engine.engine import Engine
from ecrm.metrics import Histogram, logit_losses
from ecrm.model.batch import SlotBatch


@dataclass(frozen=True)
class Evaluation:
    """Area under the ROC curve and log loss over the held-out samples; None where undefined, as with a logit that is not finite.

    `auc` is within `auc_error` of the exact one: see `Histogram.auc`.
    """

    samples: int
    auc: float | None
    auc_error: float | None
    log_loss: float | None


class _Scores:
    """What one rank's slots have scored: a histogram, whose counts add up in any order, and each slot's sum of losses."""

    def __init__(self) -> None:
        self._histogram = Histogram()
        self._losses: dict[int, float] = {}

    def add(self, slot: int, labels: Tensor, logits: Tensor) -> None:
        """Count a slot's next batch; a logit that is not finite makes the slot's loss NaN."""
        target, scores = labels.numpy(), logits.numpy()
        loss = float("nan")
        if bool(torch.isfinite(logits).all()):
            self._histogram.add(target, scores)
            loss = float(logit_losses(target, scores).sum())
        self._losses[slot] = self._losses.get(slot, 0.0) + loss

    def message(self) -> list[Tensor]:
        """All of it as four tensors, none where nothing was scored."""
        if not self._losses:
            return []
        places, counts = map(torch.from_numpy, self._histogram.export())
        return [places, counts, torch.tensor(list(self._losses)), torch.tensor(list(self._losses.values()), dtype=torch.float64)]

    def merge(self, message: list[Tensor]) -> None:
        """Add another rank's message."""
        places, counts, slots, losses = message
        self._histogram.merge(places.numpy(), counts.numpy())
        self._losses.update(zip(slots.tolist(), losses.tolist(), strict=True))

    def evaluation(self, samples: int) -> Evaluation:
        """The measures over all slots; losses are added in slot order."""
        total = sum(self._losses[slot] for slot in sorted(self._losses))
        if not samples or total != total:
            return Evaluation(samples, None, None, None)
        return Evaluation(samples, *self._histogram.auc(), total / samples)


def evaluate(engine: Engine, dataset: CriteoDataset, offsets: torch.Tensor, global_batch: int) -> Evaluation | None:
    """Collective: score the whole held-out split; the reporter gets the result, every other rank None.

    The result depends on the model and the slots alone, to the bit, not on who runs them; while a stand-in answers for shards that are away, on
    what its ranks have seen of them, too. Raises StepAborted after a
    failure, StopAgreed when a rank asks to stop, and then has no effect: the next evaluation starts from the split's
    first row.
    """
    slots = len(engine.view.slots)
    scores = _Scores()
    for first in range(0, dataset.eval_rows, global_batch):
        size = min(global_batch, dataset.eval_rows - first)
        engine.heed_stop()
        engine.enter("evaluate")
        batches = {}
        for slot in engine.slots:
            start, end = first + size * slot // slots, first + size * (slot + 1) // slots
            if end > start:
                dense, ids, target = dataset.eval_batch(start, end - start)
                batches[slot] = SlotBatch.of(dense, ids, target, offsets)
        values = engine.lookup({slot: [batch.rows] for slot, batch in batches.items()})
        with torch.no_grad():
            for slot, batch in batches.items():
                logits = engine.dense.module(batch.dense, values[slot][0], batch.places)
                scores.add(slot, batch.labels, logits)
    return _gather(engine, scores, dataset.eval_rows)


def _gather(engine: Engine, scores: _Scores, samples: int) -> Evaluation | None:
    """Measures over all ranks' scores, on the reporter."""
    mine = scores.message()
    with engine.recovering():
        received = engine.transport.exchange({engine.view.reporter: mine} if mine else {})
        engine.transport.agree(True)
    if engine.rank != engine.view.reporter:
        return None
    merged = _Scores()
    for message in received.values():
        merged.merge(list(message))
    return merged.evaluation(samples)

"""Evaluation on the held-out split: slots score their shares, the reporter merges the counts.

Memory does not grow with the split: each rank keeps one histogram of logits and one sum of losses
per slot.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ecrm.data.dataset import CriteoDataset
from ecrm.device.copies import on_device, on_host
from ecrm.engine.engine import Engine
from ecrm.metrics import Histogram, logit_losses
from ecrm.model.slot_batch import SlotBatch
from ecrm.train.build_engine import dense_of
from ecrm.train.finite import origin
from ecrm.transport.message import tensors


@dataclass(frozen=True)
class Evaluation:
    """Area under the ROC curve and log loss over the held-out samples.

    `auc` and `log_loss` are `None` if undefined, as with a nonfinite logit.

    `auc` is within `auc_error` of the exact area: see `Histogram.auc`. `train_loss` is the sum of
    the mean losses of all steps trained so far. `not_finite` is the lowest slot with a nonfinite
    logit, and the origin of the nonfinite value in words.
    """

    samples: int
    auc: float | None
    auc_error: float | None
    log_loss: float | None
    train_loss: float = 0.0
    not_finite: tuple[int, str] | None = None


class _Scores:
    """The scores of one rank's slots: a histogram of all slots, and a sum of losses per slot.

    The counts of the histogram add up in any order.
    """

    def __init__(self) -> None:
        self._histogram = Histogram()
        self._losses: dict[int, float] = {}

    def add(self, slot: int, labels: Tensor, logits: Tensor) -> bool:
        """Count a slot's next batch; returns whether all logits are finite.

        A nonfinite logit makes the slot's loss NaN.
        """
        target, scores = labels.numpy(), logits.numpy()
        loss, finite = float("nan"), bool(torch.isfinite(logits).all())
        if finite:
            self._histogram.add(target, scores)
            loss = float(logit_losses(target, scores).sum())
        self._losses[slot] = self._losses.get(slot, 0.0) + loss
        return finite

    def message(self) -> list[Tensor]:
        """The scores as four tensors; no tensors without scores."""
        if not self._losses:
            return []
        places, counts = map(torch.from_numpy, self._histogram.export())
        return [
            places,
            counts,
            torch.tensor(list(self._losses)),
            torch.tensor(list(self._losses.values()), dtype=torch.float64),
        ]

    def merge(self, message: list[Tensor]) -> None:
        """Add the message of a rank."""
        places, counts, slots, losses = message
        self._histogram.merge(places.numpy(), counts.numpy())
        self._losses.update(zip(slots.tolist(), losses.tolist(), strict=True))

    def evaluation(self, samples: int) -> Evaluation:
        """The measures over all slots; losses are added in slot order."""
        total = sum(self._losses[slot] for slot in sorted(self._losses))
        if not samples or total != total:
            return Evaluation(samples, None, None, None)
        return Evaluation(samples, *self._histogram.auc(), total / samples)


def evaluate(
    engine: Engine, dataset: CriteoDataset, offsets: torch.Tensor, global_batch: int
) -> Evaluation:
    """Collective: score the whole held-out split; every rank gets the same result.

    The result depends only on the model and the slots, to the bit, not on the ranks of the slots.
    While a stand-in answers for shards away, the result also depends on the rows seen by the
    stand-in's ranks. Raises StepAborted after a failure and StopAgreed if a rank asks to stop; the
    call then has no effect, and the next evaluation starts from the split's first row.
    """
    slots = len(engine.view.slots)
    scores, troubles = _Scores(), {}
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
                replica, labels = dense_of(engine), batch.labels
                batch = batch.on(replica.device)
                rows = on_device(replica.device, values[slot][0])
                (logits,) = on_host(replica.module(batch.dense, rows, batch.places))
                if not scores.add(slot, labels, logits) and slot not in troubles:
                    troubles[slot] = origin(replica.module, batch, rows, engine.state.spaces[0])
    return _gather(engine, scores, troubles, dataset.eval_rows)


def _gather(engine: Engine, scores: _Scores, troubles: dict[int, str], samples: int) -> Evaluation:
    """Measures over all ranks' scores, from the reporter, and the lowest slot's trouble."""
    mine, reporter = scores.message(), engine.view.reporter
    said: dict[str, Any] = {"troubles": sorted(troubles.items())}
    with engine.recovery.recovering():
        received = engine.state.transport.exchange({reporter: mine} if mine else {})
        if engine.rank == reporter:
            merged = _Scores()
            for message in received.values():
                merged.merge(tensors(message))
            said["result"] = asdict(
                replace(merged.evaluation(samples), train_loss=float(dense_of(engine).loss_sum))
            )
        heard = engine.state.transport.gather(said, "the model was evaluated")
    first = min(
        (tuple(trouble) for words in heard.values() for trouble in words["troubles"]), default=None
    )
    return Evaluation(**{**heard[reporter]["result"], "not_finite": first})

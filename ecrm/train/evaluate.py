"""Evaluation on the held-out split: every slot scores its share, the reporter gathers the scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ecrm.data.dataset import CriteoDataset
from ecrm.engine.engine import Engine
from ecrm.model.batch import SlotBatch
from ecrm.train.metrics import auc, log_loss
from ecrm.transport.message import in_groups


@dataclass(frozen=True)
class Evaluation:
    """Area under the ROC curve and log loss over the held-out samples; None where undefined."""

    samples: int
    auc: float | None
    log_loss: float | None


def evaluate(engine: Engine, dataset: CriteoDataset, offsets: torch.Tensor, global_batch: int) -> Evaluation | None:
    """Collective: score the whole held-out split; the reporter gets the result, every other rank None.

    Raises StepAborted after a failure, StopAgreed when a rank asks to stop, and then has no effect.
    """
    slots = len(engine.view.slots)
    scored: dict[int, list[torch.Tensor]] = {slot: [] for slot in engine.slots}
    labels: dict[int, list[torch.Tensor]] = {slot: [] for slot in engine.slots}
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
                scored[slot].append(engine.dense.module(batch.dense, batch.embeddings(values[slot][0])))
                labels[slot].append(batch.labels)
    return _gather(engine, scored, labels)


def _gather(
    engine: Engine, scored: dict[int, list[torch.Tensor]], labels: dict[int, list[torch.Tensor]]
) -> Evaluation | None:
    """Measures over all slots' logits and labels, slots ascending, on the reporter."""
    mine: list[torch.Tensor] = []
    for slot in scored:
        if scored[slot]:
            mine += (torch.tensor([slot]), torch.cat(scored[slot]), torch.cat(labels[slot]))
    with engine.recovering():
        received = engine.transport.exchange({engine.view.reporter: mine} if mine else {})
        engine.transport.agree(True)
    if engine.rank != engine.view.reporter:
        return None
    slots = sorted((group for tensors in received.values() for group in in_groups(tensors, 3)), key=lambda g: int(g[0]))
    logits = np.concatenate([np.empty(0, np.float32), *(group[1].numpy() for group in slots)])
    target = np.concatenate([np.empty(0, np.float32), *(group[2].numpy() for group in slots)])
    return Evaluation(int(target.size), auc(target, logits), log_loss(target, logits))

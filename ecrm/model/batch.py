"""One slot's share of a step: unique rows to ask for, pooling, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ecrm.kernels.scatter_add import scatter_add
from ecrm.model.replica import FlatDenseReplica


@dataclass(frozen=True)
class SlotBatch:
    """Samples of one slot: `dense` [B, N], `labels` [B] float32, and the rows they use.

    `rows` are unique row numbers of the row space, int64 [U]; `places` int64 [B * F] says which of
    them each (sample, feature) is.
    """

    dense: Tensor
    labels: Tensor
    rows: Tensor
    places: Tensor

    @staticmethod
    def of(dense: Tensor, ids: Tensor, labels: Tensor, offsets: Tensor) -> SlotBatch:
        """From ids int64 [B, F] of F tables whose first rows in the row space are `offsets`, int64 [F]."""
        rows, places = (ids + offsets).unique(return_inverse=True)
        return SlotBatch(dense, labels, rows, places.reshape(-1))

    def embeddings(self, values: Tensor) -> Tensor:
        """Rows [U, D] spread to [B, F, D]."""
        features = self.places.numel() // self.labels.numel()
        return values.index_select(0, self.places).view(self.labels.numel(), features, -1)


@dataclass(frozen=True)
class SlotForward:
    """A slot between forward and backward: `probabilities` [B] float32, detached, and the graph of its share of the loss."""

    batch: SlotBatch
    embeddings: Tensor
    loss: Tensor
    probabilities: Tensor


def forward(replica: FlatDenseReplica, batch: SlotBatch, values: Tensor, global_batch: int) -> SlotForward:
    """Forward of one slot with its rows' `values`, [U, D].

    The loss is the slot's share of the mean over the global batch, so shares and gradients add up.
    """
    embeddings = batch.embeddings(values).requires_grad_()
    logits = replica.module(batch.dense, embeddings)
    loss = binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum") / global_batch
    return SlotForward(batch, embeddings, loss, logits.detach().sigmoid())


def backward(replica: FlatDenseReplica, slot: SlotForward) -> tuple[Tensor, Tensor]:
    """Backward of one slot: (gradients of its rows [U, D], contribution to the dense replicas [P + 1])."""
    replica.begin_slot()
    slot.loss.backward()
    gradients = torch.zeros(slot.batch.rows.numel(), slot.embeddings.shape[-1])
    scatter_add(gradients, slot.batch.places, slot.embeddings.grad.flatten(0, 1))
    return gradients, replica.contribution(slot.loss.detach())

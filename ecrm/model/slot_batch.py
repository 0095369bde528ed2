"""One slot's share of a step: unique rows to ask for, pooling, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ecrm.device.copies import coming, on_device
from ecrm.kernels.unit_order import unique_by_unit
from ecrm.model.replica import FlatDenseReplica


@dataclass(frozen=True)
class SlotBatch:
    """Samples of a slot: `dense` [B, N], `labels` [B] float32, and the rows used by the samples.

    `rows` are unique row numbers of the row space, int64 [U]; `places`, int64 [B * F], is the index
    in `rows` for each (sample, feature).
    """

    dense: Tensor
    labels: Tensor
    rows: Tensor
    places: Tensor

    @staticmethod
    def of(dense: Tensor, ids: Tensor, labels: Tensor, offsets: Tensor) -> SlotBatch:
        """A batch from `ids`, int64 [B, F], of F tables.

        `offsets`, int64 [F], are the tables' first rows in the row space.
        """
        return SlotBatch(dense, labels, *unique_by_unit((ids + offsets).reshape(-1), units=1))

    def on(self, device: torch.device) -> SlotBatch:
        """The same batch on a device, except for `rows`; the batch itself if already there."""
        if self.dense.device == device:
            return self
        return replace(
            self,
            dense=on_device(device, self.dense),
            labels=on_device(device, self.labels),
            places=on_device(device, self.places),
        )


@dataclass(frozen=True)
class SlotForward:
    """A slot between forward and backward, on the device of the model.

    `loss` is the slot's share of the loss, with the graph leading to the rows' `values`, [U, D].
    `logits` are float32 [B], detached, on the CPU: ready once `backward` has returned. `sums` is
    memory for the rows' gradients, on the CPU.
    """

    batch: SlotBatch
    values: Tensor
    loss: Tensor
    logits: Tensor
    sums: Tensor | None


def forward(
    replica: FlatDenseReplica,
    batch: SlotBatch,
    values: Tensor,
    global_batch: int,
    sums: Tensor | None = None,
) -> SlotForward:
    """Forward of one slot with the rows' `values`, [U, D], from the CPU.

    If `sums`, [U, D], contiguous, on the CPU, is given, the gradients of the rows will be in
    `sums`. The loss is the slot's share of the mean over the global batch, so shares and gradients
    add up.
    """
    batch = batch.on(replica.device)
    values = on_device(replica.device, values).detach().requires_grad_()
    logits = replica.module(batch.dense, values, batch.places, None if values.is_cuda else sums)
    loss = binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum") / global_batch
    return SlotForward(batch, values, loss, coming(logits.detach()), sums)


def backward(replica: FlatDenseReplica, slot: SlotForward) -> tuple[Tensor, Tensor]:
    """Backward of one slot.

    Returns the gradients of the slot's rows, [U, D], and the contribution to the dense replicas, [P
    + 1], with the slot's share of the loss at the end. Both are on the CPU.
    """
    replica.begin_slot()
    slot.loss.backward()
    gradients = slot.values.grad
    assert gradients is not None
    if gradients.is_cuda:
        gradients = coming(gradients, slot.sums)
    # waits for all copies begun to the CPU
    return gradients, replica.contribution(slot.loss.detach())

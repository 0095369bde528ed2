"""The definition, in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from ecrm.kernels.scatter_add import reference


def bag_sum(rows: Tensor, places: Tensor, lengths: Tensor, features: int) -> Tensor:
    """As in the package, with the rows in one place."""
    samples = lengths.numel() // features
    bags = torch.arange(lengths.numel()).repeat_interleave(lengths)
    out = torch.zeros(lengths.numel(), rows.shape[1])
    if places.numel():
        reference.add(out, bags, rows[places])
    by_sample = out.view(features, samples, rows.shape[1]).transpose(0, 1)
    return by_sample.reshape(samples, features * rows.shape[1])

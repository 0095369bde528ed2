"""The definition, in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from ecrm.kernels.scatter_add import reference


def bag_sum(
    rows: Tensor,
    places: Tensor,
    lengths: Tensor,
    features: int,
    mean: bool,
    weights: Tensor | None,
) -> Tensor:
    """As in the package, with the rows in one place."""
    samples = lengths.numel() // features
    bags = torch.arange(lengths.numel()).repeat_interleave(lengths)
    out = torch.zeros(lengths.numel(), rows.shape[1])
    if weights is not None:
        first = lengths.cumsum(0) - lengths
        for turn in range(int(lengths.max()) if lengths.numel() else 0):
            (some,) = (lengths > turn).nonzero(as_tuple=True)
            use = first[some] + turn
            out[some] = fused(weights[use].unsqueeze(1), rows[places[use]], out[some])
    elif places.numel():
        reference.add(out, bags, rows[places])
    if mean:
        out /= lengths.clamp(min=1).unsqueeze(1)
    by_sample = out.view(features, samples, rows.shape[1]).transpose(0, 1)
    return by_sample.reshape(samples, features * rows.shape[1])


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` of float32, rounded once.

    The product is exact in float64. The sum is rounded to odd there: a second rounding, to float32,
    then gives the bits of a single one (Boldo and Melquiond, 2008).
    """
    product, term = a.double() * b.double(), c.double()
    total = product + term
    part = total - product
    error = (product - (total - part)) + (term - part)
    bits = total.view(torch.int64)
    to_odd = (error != 0) & (bits & 1 == 0) & total.isfinite()
    away = (error > 0) == (total > 0)
    return torch.where(to_odd, bits + torch.where(away, 1, -1), bits).view(torch.float64).float()

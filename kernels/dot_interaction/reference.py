"""The definition, in the order of additions of all backends; runs on any device."""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 16


def _rows(dense: Tensor, values: Tensor, places: Tensor) -> Tensor:
    """The rows of all samples, the dense row first, [B, F + 1, D]."""
    batch, width = dense.shape
    features = places.shape[0] // batch if batch else 0
    return torch.cat((dense.unsqueeze(1), values[places].view(batch, features, width)), dim=1)


def forward(dense: Tensor, values: Tensor, places: Tensor) -> Tensor:
    rows = torch.nn.functional.pad(_rows(dense, values, places), (0, -dense.shape[1] % LANES))
    first, second = torch.triu_indices(rows.shape[1], rows.shape[1], offset=1, device=dense.device)
    products = (rows[:, first] * rows[:, second]).unflatten(2, (-1, LANES))
    sums = (
        torch.zeros_like(products[:, :, 0])
        if products.shape[2]
        else products.new_zeros(*products.shape[:2], LANES)
    )
    for part in products.unbind(2):
        sums = sums + part
    for half in (8, 4, 2, 1):
        sums = sums[..., :half] + sums[..., half : 2 * half]
    return torch.cat((dense, sums.squeeze(-1)), dim=1)


def backward(
    gradients: Tensor, dense: Tensor, values: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the dense rows, [B, D], and of the embedding rows, [B, F, D]."""
    rows, width = _rows(dense, values, places), dense.shape[1]
    count = rows.shape[1]
    first, second = torch.triu_indices(count, count, offset=1, device=dense.device)
    factors = gradients.new_zeros(dense.shape[0], count, count)
    factors[:, first, second] = factors[:, second, first] = gradients[:, width:]
    found = torch.zeros_like(rows)
    found[:, 0] = gradients[:, :width]
    for i in range(count):
        for j in range(count):
            if i != j:
                found[:, i] += factors[:, i, j, None] * rows[:, j]
    return found[:, 0], found[:, 1:]

"""The definition, in plain torch operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ecrm.kernels.pieces import Piece


def copy(out: Tensor, pieces: Sequence[Piece]) -> None:
    """As in the package."""
    target = _bytes(out)
    for source, at, picked, to in pieces:
        rows = to if picked is None else picked
        if not source.numel() or (rows is not None and not rows.numel()):
            continue
        height = len(source) if picked is not None else 1 if to is None else len(to)
        values = _bytes(source).view(height, -1)
        values = values if picked is None else values[picked]
        if to is None:
            target[at : at + values.numel()] = values.flatten()
        else:
            places = at + to.unsqueeze(1) * values.shape[1] + torch.arange(values.shape[1])
            target[places] = values


def _bytes(tensor: Tensor) -> Tensor:
    """All bytes of a contiguous tensor, uint8 [N]."""
    return tensor.detach().reshape(-1).view(torch.uint8)

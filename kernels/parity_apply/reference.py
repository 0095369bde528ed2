"""The definition: row by row, with products from a table."""

from __future__ import annotations

import torch

from ecrm.kernels.field import products


def apply(
    parity: torch.Tensor, rows: torch.Tensor, coefficients: torch.Tensor, delta: torch.Tensor
) -> None:
    table = products(parity.device)
    for i, row in enumerate(rows.tolist()):
        parity[row] ^= table[int(coefficients[i])][delta[i].long()]

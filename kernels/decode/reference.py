"""The definition: products from a table, unit by unit."""

from __future__ import annotations

import torch

from ecrm.kernels.field import products


def multiply(planes: list[torch.Tensor], matrix: torch.Tensor, out: torch.Tensor) -> None:
    table = products(out.device)
    out.zero_()
    for w, row in enumerate(matrix.tolist()):
        for coefficient, plane in zip(row, planes):
            out[w] ^= table[coefficient][plane.long()]

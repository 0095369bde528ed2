"""The definition, in plain torch operations. Numbers of int64 stand for numbers modulo 2^64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

LOW = 0xFFFF_FFFF


def mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Hash int64 numbers. Every bit of a result depends on every bit of the number.

    The finalizer of MurmurHash3 for 64 bits (Appleby, public domain).
    """
    for factor in (-0xAE502812AA7333, -0x3B314601E57A13AD):
        numbers = (numbers ^ _shifted(numbers)) * factor
    return numbers ^ _shifted(numbers)


def _shifted(numbers: torch.Tensor) -> torch.Tensor:
    """`numbers` >> 33, with zeros from above."""
    return (numbers >> 33) & 0x7FFF_FFFF


def row_digest(
    rows: torch.Tensor, numbers: torch.Tensor, keys: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    """As in the package; `keys` and `factors` come from `_keys`."""
    half = keys.shape[1] // 2
    words = F.pad(rows.view(torch.int32), (0, 2 * half - rows.shape[1])).long()
    sums = []
    for key, factor in zip(keys.long(), factors):
        keyed = (words + key) & LOW
        products = (keyed[:, :half] * keyed[:, half:]).sum(1)
        sums.append(mixed(products + mixed(numbers) * factor).sum())
    return torch.stack(sums)

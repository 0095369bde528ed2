"""The dtype of rows and gradients of rows on the way between ranks.

With bfloat16 the rounding is a part of the model, so that no layout and no failure changes a bit. A
model reads rows rounded to bfloat16. Bags are summed in float32, and rounded. Gradients of bags are
rounded. A slot's gradients of a row are summed in float32, divided, and rounded. Shards sum the
gradients of slots in float32; rows, optimizer state and parity stay float32.

All these numbers fit into two bytes. So a rank without access to the sender's memory gets two
bytes, and any other rank reads float32 in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WIRE_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Wire:
    """The form of rows and gradients on the way to a rank.

    Args:
        dtype: The dtype that values are rounded to, float32 or bfloat16.
        at_hand: Whether a rank reads the memory of this rank.
        whole_rows: Whether rows travel as float32, because slots keep copies for the protection.
    """

    dtype: torch.dtype = torch.float32
    at_hand: Callable[[int], bool] = lambda rank: True
    whole_rows: bool = False

    def of_values(self, rank: int) -> torch.dtype:
        """The dtype of sums and gradients for a rank."""
        return torch.float32 if self.at_hand(rank) else self.dtype

    def of_rows(self, rank: int) -> torch.dtype:
        """The dtype of rows for a rank."""
        return torch.float32 if self.whole_rows else self.of_values(rank)


EXACT = Wire()
"""Rows and gradients travel as float32, and are not rounded."""


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round values, float32, to the nearest numbers of a dtype, in place; return the values."""
    return values if dtype == values.dtype else values.copy_(values.to(dtype))

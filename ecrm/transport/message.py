"""A message is a flat list of tensors; records in it are runs of a fixed number of tensors, a head first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Picked:
    """Some rows of a tensor in a message: `source`, [R, ...], and `rows`, int64 [n]. What arrives is `source[rows]`, flattened.

    The rows are gathered as the message is packed, which saves a copy; until then `source` must not change.
    """

    source: Tensor
    rows: Tensor

    def numel(self) -> int:
        return self.rows.numel() * self.source[:1].numel() if self.source.numel() else 0

    def element_size(self) -> int:
        return self.source.element_size()

    def gathered(self, out: Tensor | None = None) -> Tensor:
        """The rows, [n, ...]; with `out`, of that shape, written there."""
        return torch.index_select(self.source, 0, self.rows, out=out)


Part = Tensor | Picked
"""What a message is made of."""


def in_groups(tensors: Sequence[Tensor], size: int) -> Iterator[tuple[Tensor, ...]]:
    """The tensors in runs of `size`; raises ValueError when they do not divide."""
    return zip(*[iter(tensors)] * size, strict=True)

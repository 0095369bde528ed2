"""A message is a flat list of tensors; records in it are runs of a fixed number of tensors, a head first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor


def in_groups(tensors: Sequence[Tensor], size: int) -> Iterator[tuple[Tensor, ...]]:
    """The tensors in runs of `size`; raises ValueError when they do not divide."""
    return zip(*[iter(tensors)] * size, strict=True)

"""A message is a flat list of parts: tensors and heads, in groups that a head begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ecrm.transport.gpu_copies import on_device
from ecrm.transport.pinned import memory_to_send


@dataclass(frozen=True)
class Picked:
    """Some rows of a tensor in a message: `source`, [R, ...], and `rows`, int64 [n].

    What arrives is `source[rows]`, flattened. Where `source` is shared memory, another of these,
    [R, D], arrives, and the receiver picks the rows.

    The rows are gathered as the message is packed, which saves a copy; until then `source` must not
    change, and if it is shared, until `Transport.allocate_shared` lets it.
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


Head = tuple[int, ...]
"""A few whole numbers of 64 bits, which say what follows: cheaper by far than a tensor of them."""

Part = Tensor | Picked | Head
"""What a message is made of."""

Received = Tensor | Picked | Head
"""What comes out of one.

A `Picked` comes only where one was sent: who expects that takes the part by `matrix` or `gathered`.
"""


def tensors(parts: Sequence[Received]) -> list[Tensor]:
    """Parts that are all tensors, as tensors."""
    assert all(isinstance(part, Tensor) for part in parts)
    return cast(list[Tensor], parts)


def matrix(came: Tensor | Picked, rows: int) -> tuple[Tensor, Tensor | None]:
    """So many rows that came, as a matrix, [R, D], and which of its rows they are.

    The rows are int64 [n], None for all of them in order.
    """
    return (came.source, came.rows) if isinstance(came, Picked) else (came.view(rows, -1), None)


def matrix_on(
    device: torch.device, came: Tensor | Picked, rows: int
) -> tuple[Tensor, Tensor | None]:
    """As `matrix`, on a device. Of rows picked in memory of the CPU only these are copied there.

    The copy is not waited for: what came may not change before the next exchange, share or shrink.
    """
    if device.type == "cpu":
        return matrix(came, rows)
    if isinstance(came, Picked) and came.source.is_cpu:
        size = came.numel() * came.element_size()
        memory = memory_to_send(size).view(came.source.dtype)
        came = came.gathered(memory.view(rows, *came.source.shape[1:])).reshape(-1)
    return on_device(device, gathered(came)).view(rows, -1), None


def gathered(came: Tensor | Picked) -> Tensor:
    """Rows that came, flattened: memory of the caller's own only if they were picked."""
    return came.gathered().reshape(-1) if isinstance(came, Picked) else came


def copied(part: Part) -> Received:
    """What comes out of a message for `part`, in memory of its own.

    Raises OverflowError for numbers of more than 64 bits.
    """
    if isinstance(part, tuple):
        return tuple(np.array(part, np.int64).tolist())
    return (
        part.gathered().reshape(-1)
        if isinstance(part, Picked)
        else part.detach().reshape(-1).clone()
    )


def in_groups(parts: Sequence[Received], size: int) -> Iterator[tuple[Any, ...]]:
    """The parts in runs of `size`; raises ValueError when they do not divide."""
    return zip(*[iter(parts)] * size, strict=True)

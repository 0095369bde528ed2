"""A message: a flat list of parts, tensors and heads, in groups begun by a head."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ecrm.device.copies import on_device
from ecrm.device.pinned import memory_to_send


@dataclass(frozen=True)
class Picked:
    """Rows of a tensor in a message: `source`, [R, ...], and `rows`, int64 [n].

    The receiver gets `source[rows]`, flattened. If `source` is shared memory, the receiver gets a
    `Picked` with a [R, D] source, and picks the rows.

    The rows are gathered during packing, which saves a copy; until then `source` must not change. A
    shared `source` must not change until `Transport.allocate_shared` allows the change.
    """

    source: Tensor
    rows: Tensor

    def numel(self) -> int:
        height = self.source.shape[0]  # no view of a row: one message of a thousand asks for this
        return self.rows.numel() * (self.source.numel() // height) if height else 0

    def element_size(self) -> int:
        return self.source.element_size()

    def row_bytes(self) -> int:
        """Bytes of a row; 0 for a source without rows."""
        height = self.source.shape[0]
        return self.source.nbytes // height if height else 0

    def gathered(self, out: Tensor | None = None) -> Tensor:
        """Return the rows, [n, ...], written to `out` of the same shape if given."""
        return torch.index_select(self.source, 0, self.rows, out=out)


Head = tuple[int, ...]
"""A few 64-bit integers describing the following parts: far cheaper than a tensor of integers."""

Part = Tensor | Picked | Head
"""A part of a message to send."""

Received = Tensor | Picked | Head
"""A part of a received message.

A `Picked` arrives only if a `Picked` was sent; the receiver reads such a part by `matrix` or
`gathered`.
"""


def json_part(value: Any) -> Tensor:
    """A value, of a kind that JSON has, as a part of a message, uint8 [N]."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def of_json_part(part: Received) -> Any:
    """The value of a received `json_part`."""
    return json.loads(tensors([part])[0].numpy().tobytes())


def tensors(parts: Sequence[Received]) -> list[Tensor]:
    """Return the parts as tensors; asserts that all are tensors."""
    assert all(isinstance(part, Tensor) for part in parts)
    return cast(list[Tensor], parts)


def matrix(came: Tensor | Picked, rows: int) -> tuple[Tensor, Tensor | None]:
    """Return received rows as a matrix, [R, D], and the row numbers within the matrix.

    `rows` is the number of rows. The row numbers are int64 [n], `None` for all rows in order.
    """
    return (came.source, came.rows) if isinstance(came, Picked) else (came.view(rows, -1), None)


def matrix_on(
    device: torch.device, came: Tensor | Picked, rows: int
) -> tuple[Tensor, Tensor | None]:
    """As `matrix`, on a device. Of rows picked in CPU memory only these rows are copied.

    The host does not wait for the copy: the part may not change before the next exchange, share or
    shrink.
    """
    if device.type == "cpu":
        return matrix(came, rows)
    if isinstance(came, Picked) and came.source.is_cpu:
        size = came.numel() * came.element_size()
        memory = memory_to_send(size).view(came.source.dtype)
        came = came.gathered(memory.view(rows, *came.source.shape[1:])).reshape(-1)
    return on_device(device, gathered(came)).view(rows, -1), None


def gathered(came: Tensor | Picked) -> Tensor:
    """Return received rows, flattened: memory of the caller's own only after `Picked`."""
    return came.gathered().reshape(-1) if isinstance(came, Picked) else came


def copied(part: Part) -> Received:
    """Return the received form of `part`, in memory of its own.

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
    """Return the parts in runs of `size`; raise ValueError if the count is no multiple."""
    return zip(*[iter(parts)] * size, strict=True)

"""The rows fetched for the running slot, shared by the collections of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ecrm.tables.batch_rows import BatchRows


@dataclass(frozen=True)
class FetchedRows:
    """The rows of one slot's batch, with their values.

    `leaves[space]` are float32 [U, dim], the values of `batch.rows[space]`. In training the leaves
    require gradients, and backward leaves the gradients of the rows in the leaves.

    `memory` is for the gradients, float32 [U, dim], by row space, each to be taken once. So a
    gradient need not be copied into the memory sent to servers. The memory is gone once the slot is
    over, so that a late backward changes no gradient under way.
    """

    leaves: Sequence[Tensor]
    batch: BatchRows
    memory: dict[int, Tensor] = field(default_factory=dict)

    def take_memory(self, space: int) -> Tensor | None:
        """Memory for the gradients of a row space; `None` if taken, or without any."""
        return self.memory.pop(space, None)


class RowSource:
    """The source of rows for the collections in a session: `current`.

    `current` is `None` while no slot runs.
    """

    def __init__(self) -> None:
        self.current: FetchedRows | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RowSource:
        """A copy of the model, such as an average of its weights, looks up the same rows."""
        return self

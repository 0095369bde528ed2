"""The rows fetched for the running slot, shared by the collections of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ecrm.protection.routing import FoundRows
from ecrm.tables.batch_rows import BatchRows
from ecrm.tables.pooling import BagGradients


@dataclass(frozen=True)
class FetchedRows:
    """The rows of one slot's batch, with their values.

    `leaves[space]` are float32 [U, dim], the values of `batch.rows[space]`. In training the leaves
    require gradients, and backward leaves the gradients of the rows in the leaves.

    `memory` is for the gradients, float32 [U, dim], by row space, each to be taken once. So a
    gradient need not be copied into the memory sent to servers. The memory is gone once the slot is
    over, so that a late backward changes no gradient under way.

    `unsummed` are gradients of bags by row space, left by a backward for the end of the slot. Sum,
    division and test then take one pass. Gradients are left only where the bags are the single use
    of the rows: autograd adds the gradients of several uses in its own order.

    `found[space]` tells where rows lie whose leaf is not filled yet. Bags read the rows
    there; any other use fills the leaf first (`filled`). Rows are rounded to `rounded_to` already,
    or on the way; bags and their gradients are rounded when made.
    """

    leaves: Sequence[Tensor]
    batch: BatchRows
    memory: dict[int, Tensor] = field(default_factory=dict)
    found: dict[int, FoundRows] = field(default_factory=dict)
    unsummed: dict[int, BagGradients] = field(default_factory=dict)
    rounded_to: torch.dtype = torch.float32
    _looks: dict[int, int] = field(default_factory=dict)

    def take_memory(self, space: int) -> Tensor | None:
        """Memory for the gradients of a row space; `None` if taken, or without any."""
        return self.memory.pop(space, None)

    def filled(self, space: int) -> Tensor:
        """The leaf of a row space, with the values of the rows."""
        if found := self.found.pop(space, None):
            # `data`, not `detach()`: bags saved the leaf for backward, and read the same values
            found.copy_into(self.leaves[space].data)
        return self.leaves[space]

    def look(self, space: int) -> None:
        """Count a use of the rows of a space by the model."""
        self._looks[space] = self._looks.get(space, 0) + 1
        self._settle(space)

    def leave(self, space: int, gradients: BagGradients) -> bool:
        """Leave gradients of bags for the end of the slot; `False`: autograd gets their sums."""
        if self._settle(space) or self._looks.get(space) != 1 or space not in self.memory:
            return False
        self.unsummed[space] = gradients
        return True

    def _settle(self, space: int) -> bool:
        """Give the leaf the gradient that a backward left, if any: another use adds to it."""
        gradients = self.unsummed.pop(space, None)
        if gradients is None:
            return False
        leaf, sums = self.leaves[space], self.take_memory(space)
        leaf.grad = torch.empty_like(leaf) if sums is None else sums.detach()
        gradients.sum_into(leaf.grad)
        return True


class RowSource:
    """The source of rows for the collections in a session: `current`.

    `current` is `None` while no slot runs.
    """

    def __init__(self) -> None:
        self.current: FetchedRows | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RowSource:
        """A copy of the model, such as an average of its weights, looks up the same rows."""
        return self

"""The rows fetched for the running slot, shared by the collections of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ecrm.session.batch_rows import BatchRows


@dataclass(frozen=True)
class FetchedRows:
    """The rows of one slot's batch, with their values.

    `leaves[space]` are float32 [U, dim], the values of `batch.rows[space]`. In training the leaves
    require gradients, and backward leaves the gradients of the rows in the leaves.
    """

    leaves: Sequence[Tensor]
    batch: BatchRows


class RowSource:
    """The source of rows for the collections in a session: `current`.

    `current` is `None` while no slot runs.
    """

    def __init__(self) -> None:
        self.current: FetchedRows | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RowSource:
        """A copy of the model, such as an average of its weights, looks up the same rows."""
        return self

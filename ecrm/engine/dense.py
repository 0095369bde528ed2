"""What the engine needs of the dense replica; the model behind it is the training loop's business."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class DenseReplica(Protocol):
    """Dense parameters and optimizer state, the same on every holder."""

    memory_bytes: int

    def apply(self, contributions: Sequence[Tensor]) -> None:
        """Take one step with every slot's contribution, float32 [P] each, slots ascending."""

    def commit(self) -> None:
        """The present state can no longer be taken back."""

    def undo(self) -> None:
        """Go back to the state of the last commit; calling it again changes nothing."""

    def export(self) -> list[Tensor]:
        """The committed state, for a rank that is to become a holder."""

    def load(self, state: Sequence[Tensor]) -> None:
        """Become a replica whose committed and present state is an exported one."""

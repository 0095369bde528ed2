"""What the engine needs of the dense replica, and how the slots' contributions to it are summed.

The model behind a replica is the training loop's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ecrm.errors import Unrecoverable
from ecrm.transport.base import Transport
from ecrm.transport.message import tensors
from ecrm.transport.piggyback import Outgoing


class DenseReplica(Protocol):
    """Dense parameters and optimizer state, the same on every holder."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that it takes."""

    @property
    def over(self) -> bool:
        """Whether its state says that no slot has data any more."""

    @property
    def ends_at(self) -> int:
        """The step before which training ends, as its state says; -1 for none."""

    def end_at(self, step: int) -> None:
        """Training ends before a step: part of the present state, and of that of the last commit.

        It may be told again. A later step changes nothing.
        """

    def apply(self, total: Tensor, states: Mapping[int, Tensor]) -> None:
        """Take one step with the sum of all slots' contributions, float32 [P].

        The sum may be overwritten. `states[slot]`, uint8 [N], is what a slot has sent whole; most
        slots send nothing. They are only lent: what is kept of them must be copied.
        """

    def skip(self, states: Mapping[int, Tensor]) -> None:
        """A step goes by that changes no parameter; `states` as in `apply`."""

    def commit(self) -> None:
        """The present state can no longer be taken back."""

    def undo(self) -> None:
        """Go back to the state of the last commit; calling it again changes nothing."""

    def export(self) -> list[Tensor]:
        """The committed state, for a rank that is to become a holder."""

    def present(self) -> list[Tensor]:
        """The state as it is now, committed or not, as `export` would give it after a commit."""

    @property
    def entries(self) -> Iterable[tuple[str, object]]:
        """(name, value) of all state as it is now: tensors on any device, numbers and words.

        Names and values are the same on all holders.
        """

    def is_finite(self, state: Sequence[Tensor]) -> bool:
        """Whether the parameters and optimizer state in an exported state are finite."""

    def load(self, state: Sequence[Tensor]) -> None:
        """Take an exported state as the committed and the present one.

        A state of one tensor is the parameters alone: the optimizer then begins anew.
        """


class SlicedSum:
    """The sum of all slots' contributions; each holder of the dense replica sums one slice.

    Slots are added in slot order, element by element, so the result has the same bits as one sum
    over whole contributions, while every holder receives each of them by a slice only.
    """

    def __init__(self, holders: Sequence[int]) -> None:
        self._holders = tuple(holders)

    def slices(self, contribution: Tensor) -> dict[int, Tensor]:
        """A contribution, [P], cut for the holders: {holder: its slice}; slices may be empty."""
        return dict(zip(self._holders, contribution.tensor_split(len(self._holders)), strict=True))

    @staticmethod
    def reduce(by_slot: Mapping[int, Tensor]) -> Tensor:
        """The sum of one slice of all slots, in slot order."""
        slots = iter(sorted(by_slot))
        total = by_slot[next(slots)].clone()
        for slot in slots:
            total += by_slot[slot]
        return total

    def assemble(self, by_holder: Mapping[int, Tensor]) -> Tensor:
        """The whole sum, [P], from the slices that the holders have summed."""
        return torch.cat([by_holder[holder] for holder in self._holders])


def spread_dense(
    transport: Transport,
    due: Sequence[int],
    holders: Sequence[int],
    export: Callable[[], list[Tensor]],
) -> list[Tensor] | None:
    """Collective: the lowest of `holders` sends its state to ranks of `due` that have none.

    All ranks know the `holders`.

    Returns the state that this rank has been given, if it has. Raises Unrecoverable on every rank
    when nobody holds one.
    """
    needing = [rank for rank in due if rank not in holders]
    if not holders:
        raise Unrecoverable(
            f"every replica of the dense model is lost (ranks {list(due)} had none yet)"
        )
    if not needing:
        return None
    sends = transport.rank == holders[0]
    outgoing: Outgoing = dict.fromkeys(needing, export()) if sends else {}
    received = transport.exchange(outgoing)
    return tensors(received[holders[0]]) if transport.rank in needing else None

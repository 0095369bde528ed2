"""The engine's view of the dense replica, and the sum of the slots' contributions.

The training loop owns the model behind a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ecrm.base.errors import Unrecoverable
from ecrm.transport.base import Transport
from ecrm.transport.message import tensors
from ecrm.transport.piggyback import Outgoing


class DenseReplica(Protocol):
    """Dense parameters and optimizer state, the same on every holder."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory taken by the replica."""

    @property
    def over(self) -> bool:
        """Whether no slot has data any more, as recorded in the state."""

    @property
    def ends_at(self) -> int:
        """The step before which training ends, as recorded in the state; -1 for no end."""

    def end_at(self, step: int) -> None:
        """Record the end of training before `step`, in the present and in the committed state.

        May be called again. A later step changes nothing.
        """

    def apply(self, total: Tensor, states: Mapping[int, Tensor]) -> None:
        """Take a step with the sum of all slots' contributions, float32 [P].

        The sum may be overwritten. `states[slot]`, uint8 [N], is the state sent whole by a slot;
        most slots send nothing. States are only lent: copy any state to be kept.
        """

    def skip(self, states: Mapping[int, Tensor]) -> None:
        """Count a step without a change of parameters; `states` as in `apply`."""

    def commit(self) -> None:
        """Commit the present state: no taking back any more."""

    def undo(self) -> None:
        """Go back to the state of the last commit; a second call changes nothing."""

    def export(self) -> list[Tensor]:
        """The committed state, for a new holder."""

    def present(self) -> list[Tensor]:
        """The present state, committed or not, as exported after a commit."""

    @property
    def entries(self) -> Iterable[tuple[str, object]]:
        """(name, value) of the whole present state: tensors on any device, numbers and words.

        Names and values are the same on all holders.
        """

    def is_finite(self, state: Sequence[Tensor]) -> bool:
        """Whether the parameters and optimizer state in an exported state are finite."""

    def load(self, state: Sequence[Tensor]) -> None:
        """Take an exported state as the committed and the present one.

        A state of a single tensor is the parameters alone: the optimizer then begins anew.
        """


class SlicedSum:
    """The sum of all slots' contributions; every holder of the dense replica sums a slice.

    Slots are added in slot order, element by element, so the result has the bits of a sum over
    whole contributions, while every holder receives only a slice of every contribution.
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
        """The whole sum, [P], from the slices summed by the holders."""
        return torch.cat([by_holder[holder] for holder in self._holders])


def spread_dense(
    transport: Transport,
    due: Sequence[int],
    holders: Sequence[int],
    export: Callable[[], list[Tensor]],
) -> list[Tensor] | None:
    """Collective: send the state of `holders` to the ranks of `due` not in `holders`.

    All ranks know the `holders`, which have the same state, and take turns as senders.

    Returns the state received by this rank, if any. Raises Unrecoverable on every rank without a
    holder.
    """
    needing = [rank for rank in due if rank not in holders]
    # parity covers rows only: a lost dense state comes back from a replica or a checkpoint
    if not holders:
        raise Unrecoverable(
            f"every replica of the dense model is lost (ranks {list(due)} had none yet)"
        )
    # an exchange without messages would cost time, and an agreement afterwards
    if not needing:
        return None
    sender = {rank: holders[number % len(holders)] for number, rank in enumerate(needing)}
    mine = [rank for rank, of in sender.items() if of == transport.rank]
    outgoing: Outgoing = dict.fromkeys(mine, export()) if mine else {}
    received = transport.exchange(outgoing)
    return tensors(received[sender[transport.rank]]) if transport.rank in sender else None

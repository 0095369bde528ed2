"""The transport given to a program on a simulated rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from ecrm.base.allocate import lazy_zeros
from ecrm.transport import wire
from ecrm.transport.base import Transport
from ecrm.transport.membership import Admit
from ecrm.transport.message import Part, Picked, Received, copied


class Calls(Protocol):
    """The methods of the cluster needed by a rank's transport."""

    def live(self, rank: int) -> tuple[int, ...]: ...
    def collective(self, rank: int, method: str, contribution: object) -> dict[int, Any]: ...
    def newcomers_wait(self, rank: int) -> bool: ...
    def shrink(self, rank: int, admit: Admit) -> None: ...
    def leave(self, rank: int) -> None: ...


class SimulatedTransport(Transport):
    """A transport that copies messages at sending, except shared memory in `exchange`.

    Each further receiver gets a separate copy.
    """

    def __init__(self, cluster: Calls, rank: int, joined: bool = False) -> None:
        self._cluster = cluster
        self.rank, self.joined = rank, joined
        self._allocate_shared: list[Tensor] = []

    def allocate_shared(self, *shape: int, dtype: type = np.float32) -> Tensor:
        memory = lazy_zeros(*shape, dtype=dtype)
        self._allocate_shared.append(memory)  # keeps the addresses from reuse
        return memory

    @property
    def live(self) -> tuple[int, ...]:  # type: ignore[override]
        return self._cluster.live(self.rank)

    @property
    def newcomers_wait(self) -> bool:
        return self._cluster.newcomers_wait(self.rank)

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> Mapping[int, list[Received]]:
        strangers = sorted(set(outgoing) - set(self.live))
        if strangers:
            raise ValueError(
                f"exchange with ranks {strangers}, which are not live; live are {self.live}"
            )
        sent = {
            rank: _copies(tensors, self._allocate_shared)
            for rank, tensors in outgoing.items()
            if tensors
        }
        self.sent_bytes += sum(
            wire.packed_bytes(tensors) for rank, tensors in sent.items() if rank != self.rank
        )
        contributions = self._cluster.collective(self.rank, "exchange", sent)
        return {
            sender: contributions[sender][self.rank]
            for sender in sorted(contributions)
            if self.rank in contributions[sender]
        }

    def share(self, tensors: Sequence[Part]) -> Mapping[int, list[Received]]:
        self.sent_bytes += wire.packed_bytes(tensors) * (len(self.live) - 1)
        contributions = self._cluster.collective(self.rank, "share", _copies(tensors))
        return {
            sender: _copies(contributions[sender])
            for sender in sorted(contributions)
            if contributions[sender]
        }

    def agree_alike(self, flag: bool, word: int | None) -> tuple[bool, bool]:
        said = self._cluster.collective(self.rank, "agree", (bool(flag), word)).values()
        words = {word for _, word in said if word is not None}
        return all(flag for flag, _ in said), len(words) < 2

    def shrink(self, admit: Admit = Admit.NO) -> None:
        self._cluster.shrink(self.rank, admit)

    def close(self) -> None:
        self._cluster.leave(self.rank)


def _copies(parts: Sequence[Part], allocate_shared: Sequence[Tensor] = ()) -> list[Received]:
    wire.check(parts)
    return [
        _shared_view(part) if _lies_in(part, allocate_shared) else copied(part) for part in parts
    ]


def _shared_view(part: Part) -> Received:
    assert not isinstance(part, tuple)
    return (
        Picked(part.source.detach(), part.rows.clone())
        if isinstance(part, Picked)
        else part.detach().reshape(-1)
    )


def _lies_in(part: Part, memory: Sequence[Tensor]) -> bool:
    if isinstance(part, tuple):
        return False
    first = (part.source if isinstance(part, Picked) else part).data_ptr()
    return any(0 <= first - place.data_ptr() < place.nbytes for place in memory)

"""The transport that a program on a simulated rank is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ecrm.transport import wire
from ecrm.transport.base import Transport
from ecrm.transport.message import Came, Part, copied


class Calls(Protocol):
    """What one rank's transport needs of the cluster."""

    def live(self, rank: int) -> tuple[int, ...]: ...
    def collective(self, rank: int, method: str, contribution: object) -> dict[int, object]: ...
    def shrink(self, rank: int) -> None: ...
    def leave(self, rank: int) -> None: ...


class SimulatedTransport(Transport):
    """Everything that travels is copied when it is sent, and again for each further receiver."""

    def __init__(self, cluster: Calls, rank: int) -> None:
        self._cluster = cluster
        self.rank = rank

    @property
    def live(self) -> tuple[int, ...]:
        return self._cluster.live(self.rank)

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> dict[int, list[Came]]:
        strangers = sorted(set(outgoing) - set(self.live))
        if strangers:
            raise ValueError(f"exchange with ranks {strangers}, which are not live; live are {self.live}")
        sent = {rank: _copies(tensors) for rank, tensors in outgoing.items() if tensors}
        self.sent_bytes += sum(wire.packed_bytes(tensors) for rank, tensors in sent.items() if rank != self.rank)
        contributions = self._cluster.collective(self.rank, "exchange", sent)
        return {
            sender: contributions[sender][self.rank]
            for sender in sorted(contributions)
            if self.rank in contributions[sender]
        }

    def share(self, tensors: Sequence[Part]) -> dict[int, list[Came]]:
        self.sent_bytes += wire.packed_bytes(tensors) * (len(self.live) - 1)
        contributions = self._cluster.collective(self.rank, "share", _copies(tensors))
        return {sender: _copies(contributions[sender]) for sender in sorted(contributions) if contributions[sender]}

    def agree(self, flag: bool) -> bool:
        return all(self._cluster.collective(self.rank, "agree", bool(flag)).values())

    def shrink(self) -> None:
        self._cluster.shrink(self.rank)

    def close(self) -> None:
        self._cluster.leave(self.rank)


def _copies(parts: Sequence[Part]) -> list[Came]:
    wire.check(parts)
    return [copied(part) for part in parts]

"""The transport that a program on a simulated rank is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from ecrm.transport import wire
from ecrm.transport.base import Transport


class Calls(Protocol):
    """What one rank's transport needs of the cluster."""

    def live(self, rank: int) -> tuple[int, ...]: ...
    def collective(self, rank: int, method: str, contribution: object) -> dict[int, object]: ...
    def shrink(self, rank: int) -> None: ...
    def leave(self, rank: int) -> None: ...


class SimulatedTransport(Transport):
    """Data goes through the same wire format as over MPI, so nobody ever sees another rank's memory."""

    def __init__(self, cluster: Calls, rank: int) -> None:
        self._cluster = cluster
        self.rank = rank

    @property
    def live(self) -> tuple[int, ...]:
        return self._cluster.live(self.rank)

    def exchange(self, outgoing: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, list[torch.Tensor]]:
        strangers = sorted(set(outgoing) - set(self.live))
        if strangers:
            raise ValueError(f"exchange with ranks {strangers}, which are not live; live are {self.live}")
        packed = {rank: wire.pack(tensors) for rank, tensors in outgoing.items() if tensors}
        messages = self._cluster.collective(self.rank, "exchange", packed)
        return {
            sender: wire.unpack(to[self.rank]) for sender, to in sorted(messages.items()) if self.rank in to
        }

    def share(self, tensors: Sequence[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        messages: dict[int, np.ndarray] = self._cluster.collective(self.rank, "share", wire.pack(tensors))
        return {sender: wire.unpack(message.copy()) for sender, message in sorted(messages.items()) if message.size}

    def agree(self, flag: bool) -> bool:
        return all(self._cluster.collective(self.rank, "agree", bool(flag)).values())

    def shrink(self) -> None:
        self._cluster.shrink(self.rank)

    def close(self) -> None:
        self._cluster.leave(self.rank)

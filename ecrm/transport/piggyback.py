"""Messages that ride along with the next exchange, so that two exchanges of a step become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ecrm.transport.base import Transport, WrappedTransport
from ecrm.transport.message import Came, Part


class RidingTransport(WrappedTransport):
    """Another transport whose next `exchange` also carries what was put aboard.

    `board` and `alight` are called by every live rank around the same exchange, or around none.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._riders: dict[int, list[Part]] | None = None
        self._arrived: dict[int, list[Came]] | None = None

    def board(self, outgoing: Mapping[int, Sequence[Part]]) -> None:
        """The next exchange also carries `outgoing`."""
        self._riders, self._arrived = (
            {rank: list(tensors) for rank, tensors in outgoing.items()},
            None,
        )

    def alight(self) -> dict[int, list[Came]]:
        """What other ranks had put aboard, as `exchange` returns it; exchanges now if nothing was exchanged since `board`."""
        if self._riders is not None:
            self.exchange({})
        arrived, self._arrived = self._arrived, None
        return arrived

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> dict[int, list[Came]]:
        if self._riders is None:
            return self.inner.exchange(outgoing)
        riders, self._riders = self._riders, None
        both = {
            rank: [(len(riders.get(rank, ())),), *riders.get(rank, ()), *outgoing.get(rank, ())]
            for rank in sorted({*riders, *outgoing})
        }
        received, self._arrived = {}, {}
        for rank, ((aboard,), *tensors) in self.inner.exchange(both).items():
            if aboard:
                self._arrived[rank] = tensors[:aboard]
            if len(tensors) > aboard:
                received[rank] = tensors[aboard:]
        return received

    def shrink(self) -> None:
        self._riders = self._arrived = None
        super().shrink()

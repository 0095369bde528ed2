"""What is sent from a GPU goes through memory of the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ecrm.transport.base import Transport, WrappedTransport
from ecrm.transport.message import Part, Picked, Received


class StagedTransport(WrappedTransport):
    """Another transport, `inner`, for a rank whose rows are on a GPU.

    What is sent may lie on a device. It is copied to pinned memory of the host first, once, however
    many ranks get it and however many rows are picked of it. What is received is on the host, as
    what lies there is sent. `allocate_shared` gives memory of the host.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        # until the call that sends it has returned, or the shrink after it
        self._staged: list[Tensor] = []

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> dict[int, list[Received]]:
        ranks = list(outgoing)
        sent = self._on_host([part for parts in outgoing.values() for part in parts])
        parts = iter(sent)
        received = self.inner.exchange(
            {rank: [next(parts) for _ in outgoing[rank]] for rank in ranks}
        )
        self._staged = []
        return received

    def share(self, tensors: Sequence[Part]) -> dict[int, list[Received]]:
        received = self.inner.share(self._on_host(tensors))
        self._staged = []
        return received

    def shrink(self) -> None:
        self.inner.shrink()
        self._staged = []

    def _on_host(self, parts: Sequence[Part]) -> list[Part]:
        """The same parts, all of them on the host.

        Copies are queued one after the other, and the last one waits for all.
        """
        on_device = {id(source): source for part in parts if (source := _source(part)) is not None}
        staged = {
            number: torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            for number, source in on_device.items()
        }
        self._staged = list(staged.values())
        filled = [number for number, source in on_device.items() if source.numel()]
        for number in filled:
            staged[number].copy_(on_device[number], non_blocking=number != filled[-1])
        return [_replaced(part, staged) for part in parts]


def _source(part: Part) -> Tensor | None:
    """The tensor of a part that lies on a device, if one does."""
    if isinstance(part, tuple):
        return None
    source = part.source if isinstance(part, Picked) else part
    return None if source.is_cpu else source


def _replaced(part: Part, staged: Mapping[int, Tensor]) -> Part:
    source = _source(part)
    if source is None:
        return part
    on_host = staged[id(source)]
    return Picked(on_host, part.rows) if isinstance(part, Picked) else on_host

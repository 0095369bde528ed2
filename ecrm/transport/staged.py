"""Send tensors of a GPU through memory of the host."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ecrm.base.allocate import ZerosOn
from ecrm.device.copies import copies_of
from ecrm.device.pinned import Arena, memory_to_send
from ecrm.transport.base import Transport, WrappedTransport
from ecrm.transport.membership import Admit
from ecrm.transport.message import Part, Picked, Received


class StagedTransport(WrappedTransport):
    """A transport around `inner`, for a rank with its rows on a GPU, `device`.

    Tensors to send may lie on the device. A call first copies each tensor to memory of the host,
    once, however many ranks get the tensor and however many rows are picked from it. A single wait
    ends all copies of a call, and also the copies to the device that read earlier messages.
    Received tensors are on the host, in pinned memory if larger than SMALL bytes.

    Memory from `lend_on_device` has a twin on the host, lent to other ranks: tensors sent from the
    memory are copied to the twin, and ranks of this host read the twin in place. `allocate_shared`
    gives memory of the host.
    """

    def __init__(self, inner: Transport, device: torch.device) -> None:
        super().__init__(inner)
        self._device = device
        self._copies = copies_of(device)
        self._arena = Arena()
        self._twins: dict[int, Tensor] = {}  # uint8, by address on the device
        self.inner.receive_memory = _receive_memory

    def lend_on_device(self, *shape: int, dtype: type = np.float32) -> Tensor:
        """Zeros on the device, to be sent and changed by the rules of `allocate_shared`."""
        memory = ZerosOn(self._device)(*shape, dtype=dtype)
        if memory.numel():
            address = memory.untyped_storage().data_ptr()
            self._twins[address] = self.inner.allocate_shared(memory.nbytes, dtype=np.uint8)
            weakref.finalize(memory, self._twins.pop, address, None).atexit = False
        return memory

    def exchange(self, outgoing: Mapping[int, Sequence[Part]]) -> Mapping[int, list[Received]]:
        ranks = list(outgoing)
        sent = self._on_host([part for parts in outgoing.values() for part in parts])
        parts = iter(sent)
        return self.inner.exchange({rank: [next(parts) for _ in outgoing[rank]] for rank in ranks})

    def share(self, tensors: Sequence[Part]) -> Mapping[int, list[Received]]:
        return self.inner.share(self._on_host(tensors))

    def shrink(self, admit: Admit = Admit.NO) -> None:
        self._wait()
        self.inner.shrink(admit)

    def _on_host(self, parts: Sequence[Part]) -> list[Part]:
        """Return the same parts on the host, where they stay until the next call."""
        on_device = {id(source): source for part in parts if (source := _source(part)) is not None}
        staged = {number: self._twin(source) for number, source in on_device.items()}
        others = [number for number, twin in staged.items() if twin is None]
        memory = self._arena.like([on_device[number] for number in others])
        on_host = {
            **{number: twin for number, twin in staged.items() if twin is not None},
            **dict(zip(others, memory)),
        }
        self._copies.to_host([(on_device[number], here) for number, here in on_host.items()])
        self._wait()
        return [_replaced(part, on_host) for part in parts]

    def _wait(self) -> None:
        if self.pulse is not None:
            self.pulse.ask()
        self._copies.wait()

    def _twin(self, source: Tensor) -> Tensor | None:
        """The place in the twin for a tensor in lent memory; `None` for any other tensor."""
        if not source.numel() or not source.is_contiguous():
            return None
        twin = self._twins.get(source.untyped_storage().data_ptr())
        if twin is None:
            return None
        first = source.storage_offset() * source.element_size()
        return twin[first : first + source.nbytes].view(source.dtype).view(source.shape)


def _receive_memory(size: int) -> np.ndarray:
    memory: np.ndarray = memory_to_send(size).numpy()
    return memory


def _source(part: Part) -> Tensor | None:
    """The tensor of a part if on a device, else `None`."""
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

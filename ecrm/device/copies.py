"""Copies between a GPU and memory of the host, on separate streams.

All copies of this project go through this module, except the copies of kernels. Copies to the GPU
run beside the GPU's computing, without a wait of the host. The host waits for copies from the GPU
right after their start, for several at once. Only the logits of a slot are copied beside other
work, the slot's backward.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ecrm.device import pinned
from ecrm.device.imitation import imitated_copies

WINDOW = 64 << 20
"""Most bytes copied to the host at once by `on_host`."""

MOST_HELD = 1 << 30
"""Most bytes of tensors held for copies still under way; above, the host waits."""


class Copies(ABC):
    """Copies that start at once and end with a common wait."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._used: list[Tensor] = []  # kept for copies perhaps under way
        self._used_bytes = 0

    def to_host(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin to copy tensors of the GPU to the host: pairs (from, to), of equal size.

        The targets are contiguous. The copies follow the work given to the current stream before.
        Until `wait` the source may not be changed and the target may not be read.
        """
        pairs = [(_bytes(there), _bytes(here)) for there, here in pairs if there.numel()]
        self._queue(
            [
                (there[piece], here[piece])
                for there, here in pairs
                for piece in pinned.pieces(self.device, here)
            ]
        )
        self._use(there for there, _ in pairs)

    def to_device(self, here: Tensor) -> Tensor:
        """Return a copy on the GPU of a contiguous host tensor, without a wait of the host.

        Work given to the current stream later follows the copy. Pinned or lent memory may not
        change until `wait`. Other memory is copied before the return.
        """
        if not (pinned.is_lent(here) or here.is_pinned()):
            if here.nbytes <= pinned.SMALL:
                return here.to(self.device, non_blocking=True)
            here = pinned.pinned_like(here).copy_(here)
        there = self._empty_like(here)
        split = pinned.pieces(self.device, here)
        self._arrive(there, [(_bytes(here)[piece], _bytes(there)[piece]) for piece in split])
        self._use([here])
        return there

    def wait(self) -> None:
        """Wait until all copies are done."""
        self._wait()
        self._used.clear()
        self._used_bytes = 0
        pinned.waited()

    def _use(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._used.append(tensor)
            self._used_bytes += tensor.nbytes
        if self._used_bytes > MOST_HELD:
            self.wait()

    @abstractmethod
    def _queue(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> None: ...

    @abstractmethod
    def _empty_like(self, here: Tensor) -> Tensor: ...

    @abstractmethod
    def _arrive(self, there: Tensor, pieces: Sequence[tuple[Tensor, Tensor]]) -> None: ...

    @abstractmethod
    def _wait(self) -> None: ...


class StreamCopies(Copies):
    """Copies of a real GPU: a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._done = torch.cuda.Event(blocking=True)

    def _queue(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            for there, here in pieces:
                here.copy_(there, non_blocking=True)

    def _empty_like(self, here: Tensor) -> Tensor:
        with torch.cuda.stream(self._up):  # new memory waits for no earlier work
            return torch.empty(here.shape, dtype=here.dtype, device=self.device)

    def _arrive(self, there: Tensor, pieces: Sequence[tuple[Tensor, Tensor]]) -> None:
        with torch.cuda.stream(self._up):
            for source, target in pieces:
                target.copy_(source, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._up)
        there.record_stream(current)

    def _wait(self) -> None:
        self._down.wait_stream(self._up)
        self._done.record(self._down)
        self._done.synchronize()


@functools.cache
def _of(device: torch.device, made: Callable[[torch.device], Copies]) -> Copies:
    return made(device)


def copies_of(device: torch.device) -> Copies:
    """The copies of this process from and to a GPU."""
    return _of(device, imitated_copies() or StreamCopies)


def on_device(device: torch.device, here: Tensor) -> Tensor:
    """Return a tensor on a device. The host does not wait for a copy to a GPU: see `to_device`."""
    if here.device == device or here.device.type == device.type:
        return here
    return copies_of(device).to_device(here.detach().contiguous())


def coming(there: Tensor, here: Tensor | None = None) -> Tensor:
    """Return a tensor on the host; a copy from a GPU is complete after a `wait` or `on_host`.

    The copy lies in `here`, contiguous, if given.
    """
    if there.is_cpu:
        return there
    here = pinned.pinned_like(there) if here is None else here
    copies_of(there.device).to_host([(there.detach(), here)])
    return here


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors on the host, copied from one GPU, with a wait per WINDOW bytes.

    Waits for all copies begun before, too.
    """
    there = [tensor for tensor in tensors if not tensor.is_cpu]
    if not there:
        return list(tensors)
    if sum(tensor.nbytes for tensor in there) > WINDOW:
        return [tensor if tensor.is_cpu else _in_windows(tensor) for tensor in tensors]
    here = [coming(tensor) for tensor in tensors]
    copies_of(there[0].device).wait()
    return here


def _in_windows(there: Tensor) -> Tensor:
    """Return a copy in ordinary memory of the host, through pinned memory."""
    copies, here = copies_of(there.device), torch.empty(there.shape, dtype=there.dtype)
    memory = pinned.pinned(min(there.nbytes, WINDOW))
    for source, target in zip(_bytes(there).split(WINDOW), _bytes(here).split(WINDOW)):
        copies.to_host([(source, memory[: len(source)])])
        copies.wait()
        target.copy_(memory[: len(source)])
    return here


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)

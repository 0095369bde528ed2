"""Copies between a GPU and memory of the host, on streams of their own.

All copies of this project go this way, but for those of kernels. Copies to the GPU go beside what
it computes, and the host does not wait for one. Copies from there are waited for as soon as they
have begun, several at once. Only the logits of a slot go beside other work, its backward.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ecrm import imitated_gpu
from ecrm.transport import pinned

WINDOW = 64 << 20
"""Bytes copied to the host at once, at most, by `on_host`."""

MOST_HELD = 1 << 30
"""Bytes of the host that copies may still read before they are waited for."""


class Copies(ABC):
    """Copies that begin at once and are waited for together."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._used: list[Tensor] = []  # by copies that may be under way
        self._used_bytes = 0

    def to_host(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin to copy tensors of the GPU to the host: (from, to) each, alike.

        What is written is contiguous. The copies come after what the current stream was given
        before. Until `wait` the one may not be changed, nor the other be read.
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
        """A copy on the GPU of a contiguous tensor of the host, for which the host does not wait.

        What the current stream is given afterwards comes after the copy. Pinned or lent memory may
        not change until `wait`. Other memory is copied before this returns.
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
    """Of a GPU that is there: a stream for each direction."""

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
        with torch.cuda.stream(self._up):  # so that it waits for nothing that was there before
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


class ImitatedCopies(Copies):
    """Of an imitated GPU. What a rank copies to pinned memory is there once it has waited.

    Until then that memory holds UNFINISHED. Raises ChangedUnderCopy in `wait`.
    """

    UNFINISHED = 0xCB  # no row number, nor a number that is lost in a sum

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._mine = threading.local()  # ranks that are simulated are threads of one process

    def _queue(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> None:
        for there, here in pieces:
            here.copy_(there, non_blocking=True)
            if here.is_pinned():
                here.fill_(self.UNFINISHED)
                self._begun("down").append((there, here))

    def _empty_like(self, here: Tensor) -> Tensor:
        return torch.empty(here.shape, dtype=here.dtype, device=self.device)

    def _arrive(self, there: Tensor, pieces: Sequence[tuple[Tensor, Tensor]]) -> None:
        for source, target in pieces:
            target.copy_(source, non_blocking=True)
            self._begun("up").append((source, source.clone()))

    def _wait(self) -> None:
        imitated_gpu.wait_for_gpu()
        down, up = self._begun("down"), self._begun("up")
        self._mine.__dict__.clear()
        for there, here in down:
            here.copy_(there, non_blocking=True)
        for source, then in up:
            if not torch.equal(source, then):
                raise imitated_gpu.ChangedUnderCopy(
                    f"{source.nbytes} bytes of the host were changed before their copy to "
                    f"{self.device} was waited for"
                )

    def _begun(self, way: str) -> list[tuple[Tensor, Tensor]]:
        begun: list[tuple[Tensor, Tensor]] = self._mine.__dict__.setdefault(way, [])
        return begun


@functools.cache
def _of(device: torch.device, imitated: bool) -> Copies:
    return ImitatedCopies(device) if imitated else StreamCopies(device)


def copies_of(device: torch.device) -> Copies:
    """The copies of this process from and to a GPU."""
    return _of(device, imitated_gpu.imitating())


def on_device(device: torch.device, here: Tensor) -> Tensor:
    """A tensor on a device. A copy for a GPU is not waited for, as `to_device` says."""
    if here.device == device or here.device.type == device.type:
        return here
    return copies_of(device).to_device(here.detach().contiguous())


def coming(there: Tensor, here: Tensor | None = None) -> Tensor:
    """A tensor on the host. A copy of one of a GPU is there after the next `wait` or `on_host`.

    It lies `here`, contiguous, if that is given.
    """
    if there.is_cpu:
        return there
    here = pinned.pinned_like(there) if here is None else here
    copies_of(there.device).to_host([(there.detach(), here)])
    return here


def on_host(*tensors: Tensor) -> list[Tensor]:
    """The tensors on the host, those of one GPU copied there, with one wait for WINDOW bytes.

    Waits for all copies that were begun before, too.
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
    """A copy in ordinary memory of the host, through pinned memory."""
    copies, here = copies_of(there.device), torch.empty(there.shape, dtype=there.dtype)
    memory = pinned.pinned(min(there.nbytes, WINDOW))
    for source, target in zip(_bytes(there).split(WINDOW), _bytes(here).split(WINDOW)):
        copies.to_host([(source, memory[: len(source)])])
        copies.wait()
        target.copy_(memory[: len(source)])
    return here


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)

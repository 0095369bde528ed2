"""Copies between a GPU and memory of the host, on streams of their own, beside what it computes."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ecrm import imitated_gpu
from ecrm.transport import pinned


class Copies(ABC):
    """Copies that begin at once and are waited for together."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._from: list[Tensor] = []  # host memory that copies still read

    def to_host(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin to copy tensors of the GPU to the host: (from, to) each, alike and contiguous.

        The copies come after what the current stream was given before. Until `wait` the one may not
        be changed, nor the other be read.
        """
        in_pieces = [
            (_bytes(there)[piece], _bytes(here)[piece])
            for there, here in pairs
            if there.numel()
            for piece in pinned.pieces(self.device, here)
        ]
        self._queue(in_pieces)

    def to_device(self, here: Tensor) -> Tensor:
        """A copy on the GPU of a contiguous tensor of the host, which may not change until `wait`.

        What the current stream is given afterwards comes after the copy. The host does not wait,
        where the tensor lies in pinned or lent memory.
        """
        there = self._empty_like(here)
        if here.numel():
            split = pinned.pieces(self.device, here)
            self._arrive(there, [(_bytes(here)[piece], _bytes(there)[piece]) for piece in split])
            self._from.append(here)
        return there

    def wait(self) -> None:
        """Wait until all copies are done."""
        self._wait()
        self._from.clear()

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
    """Of an imitated GPU, where a copy is done as it begins."""

    def _queue(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> None:
        for there, here in pieces:
            here.copy_(there, non_blocking=True)

    def _empty_like(self, here: Tensor) -> Tensor:
        return torch.empty(here.shape, dtype=here.dtype, device=self.device)

    def _arrive(self, there: Tensor, pieces: Sequence[tuple[Tensor, Tensor]]) -> None:
        for source, target in pieces:
            target.copy_(source, non_blocking=True)

    def _wait(self) -> None:
        imitated_gpu.wait_for_gpu()


@functools.cache
def _of(device: torch.device, imitated: bool) -> Copies:
    return ImitatedCopies(device) if imitated else StreamCopies(device)


def copies_of(device: torch.device) -> Copies:
    """The copies of this process from and to a GPU."""
    return _of(device, imitated_gpu.imitating())


def on_device(device: torch.device, here: Tensor) -> Tensor:
    """A tensor that came, on a device. A copy for a GPU is not waited for, as `to_device` says."""
    if here.device.type == device.type:
        return here
    return copies_of(device).to_device(here.contiguous())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)

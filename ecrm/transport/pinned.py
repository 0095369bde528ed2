"""Memory of the host that a GPU reads and writes by itself, while the CPU goes on.

Two kinds: memory that is pinned as it is made, kept for the next use; and memory that ranks lend
each other, which is registered with CUDA as it comes into use, in chunks, and is no longer before
it is unmapped. A copy must not reach from one registration into the next, so it goes in pieces.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ecrm import imitated_gpu

CHUNK = 16 << 20
"""Bytes that are registered together, and with that handed out by the system."""

MOST_BYTES = 1 << 30
"""Pinned memory that is in use at once, in bytes. What comes on top is ordinary memory."""

SMALLEST = 1 << 16
"""Bytes below which a copy is not worth pinned memory."""

_ALIGNED = 128
_READ_ONLY = 8  # cudaHostRegisterReadOnly


def register(device: torch.device, memory: Tensor | np.ndarray, read_only: bool = False) -> bool:
    """Register memory that stays where it is; whether CUDA does."""
    address, size = _place(memory)
    if imitated_gpu.imitating():
        imitated_gpu.registered[address] = size
        return True
    runtime = torch.cuda.cudart()
    torch.zeros(1, device=device)  # CUDA is up, and has no error left of before
    error = runtime.cudaHostRegister(address, size, _READ_ONLY if read_only else 0)
    if int(error) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)  # else the next kernel would be taken for what has failed
    return False


def unregister(address: int) -> None:
    """Undo `register` of memory that begins there."""
    if imitated_gpu.registered.pop(address, None) is None:
        torch.cuda.cudart().cudaHostUnregister(address)


@dataclass
class Lent:
    """A stretch of memory that ranks lend. `chunks`: by number, whether they are registered."""

    address: int
    size: int
    read_only: bool
    chunks: dict[int, bool] = field(default_factory=dict)

    def forget(self) -> None:
        """Nothing uses it any more, and it is about to be unmapped."""
        _lent.pop(self.address, None)
        for number, registered in self.chunks.items():
            if registered:
                unregister(self.address + number * CHUNK)


_lent: dict[int, Lent] = {}


def lend(memory: np.ndarray, read_only: bool) -> None:
    """Have this memory, uint8, registered as it is copied to a GPU or from one.

    That is until the array dies, and all tensors and arrays on it, which keep it alive.
    """
    lent = Lent(*_place(memory), read_only)
    _lent[lent.address] = lent
    weakref.finalize(memory, lent.forget).atexit = False


def pieces(device: torch.device, host: Tensor) -> Iterator[slice]:
    """The bytes of a contiguous tensor of the host, in stretches that are copied one by one.

    Registers what is lent and has not been registered yet.
    """
    address, size = _place(host)
    lent = next(
        (one for one in list(_lent.values()) if 0 <= address - one.address < one.size), None
    )
    if lent is None:
        yield slice(0, size)
        return
    begin = address - lent.address
    for number in range(begin // CHUNK, -(-(begin + size) // CHUNK)):
        first, end = number * CHUNK, min((number + 1) * CHUNK, lent.size)
        if number not in lent.chunks:
            lent.chunks[number] = register(
                device, _bytes_at(lent.address + first, end - first), lent.read_only
            )
        yield slice(max(first - begin, 0), min(end - begin, size))


class Arena:
    """Pinned memory for what one call sends; the next call writes over it.

    What is more than `most` bytes is ordinary memory, and is not kept.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._memory = torch.empty(0, dtype=torch.uint8)

    def like(self, tensors: list[Tensor]) -> list[Tensor]:
        """Memory of the host for values of such shapes and dtypes, contiguous, holding anything."""
        ends = np.cumsum([-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]).tolist()
        memory, total = self._memory, ends[-1] if ends else 0
        if total > len(memory):
            # given back before the larger one is asked for
            self._memory = memory = torch.empty(0, dtype=torch.uint8)
            memory = pinned(min(total + total // 4, max(total, self._most)), self._most)
            if total <= self._most:
                self._memory = memory
        return [
            memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, first in zip(tensors, [0, *ends])
        ]


_in_use = 0


def pinned(size: int, most: int = MOST_BYTES) -> Tensor:
    """Uint8 [size], pinned if no more than `most` bytes are in use so; torch keeps it for the next.

    Tensors on it keep it alive.
    """
    global _in_use
    if size > most - _in_use:
        return torch.empty(size, dtype=torch.uint8)
    try:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # the system lets no more of it be pinned
        return torch.empty(size, dtype=torch.uint8)
    _in_use += size
    weakref.finalize(memory.untyped_storage(), _given_back, size).atexit = False
    return memory


def _given_back(size: int) -> None:
    global _in_use
    _in_use -= size


def _place(memory: Tensor | np.ndarray) -> tuple[int, int]:
    """The address and the bytes of memory."""
    if isinstance(memory, Tensor):
        return memory.data_ptr(), memory.nbytes
    return memory.ctypes.data, memory.nbytes


def _bytes_at(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

"""Memory of the host that a GPU reads and writes by itself, while the CPU goes on.

The memory is of two kinds: memory pinned at allocation and kept for the next use; and memory that
ranks lend to other ranks, registered with CUDA at first use, in chunks. The registration of a chunk
ends when the chunk is freed, or long unused, or about to be unmapped. A copy must not reach from
one registration into the next, and is therefore split into pieces.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ecrm.device import imitation

CHUNK = 16 << 20
"""Bytes of a chunk: registered together, and with the registration handed out by the system."""

MOST_BYTES = 1 << 30
"""Most pinned memory in use at once, in bytes. Further memory is ordinary memory."""

SMALL = 1 << 16
"""Most bytes of ordinary memory that CUDA stages itself on the way to a GPU: not worth pinning."""

UNUSED = 256
"""Waits for copies after which the registration of an unused chunk ends."""

_ALIGNED = 128
_READ_ONLY = 8  # cudaHostRegisterReadOnly


def register(device: torch.device, memory: Tensor | np.ndarray, read_only: bool = False) -> bool:
    """Register memory that stays in place; return whether CUDA accepts."""
    address, size = _place(memory)
    if imitation.imitating():
        imitation.registered[address] = size
        return True
    runtime = torch.cuda.cudart()
    torch.zeros(1, device=device)  # starts CUDA, and shows any earlier error here
    error = runtime.cudaHostRegister(address, size, _READ_ONLY if read_only else 0)
    if int(error) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)  # clears the error: else the next kernel would seem to fail
    return False


def unregister(address: int) -> None:
    """Undo `register` of memory beginning at an address."""
    if imitation.registered.pop(address, None) is None:
        torch.cuda.cudart().cudaHostUnregister(address)


@dataclass
class Lent:
    """A stretch of memory lent by ranks, in chunks of `chunk` bytes.

    `chunks`: by number, whether the chunk is registered, and the number of waits at the last use.
    """

    address: int
    size: int
    read_only: bool
    chunk: int
    chunks: dict[int, tuple[bool, int]] = field(default_factory=dict)

    def numbers(self, begin: int, size: int) -> range:
        """The numbers of the chunks of `size` bytes from offset `begin` on."""
        return range(begin // self.chunk, -(-(begin + size) // self.chunk))

    def use(self, device: torch.device, number: int) -> None:
        """Note a copy's use of a chunk, and register a new chunk."""
        if number in self.chunks:
            registered, _ = self.chunks[number]
        else:
            first, end = number * self.chunk, min((number + 1) * self.chunk, self.size)
            memory = _bytes_at(self.address + first, end - first)
            registered = register(device, memory, self.read_only)
        self.chunks[number] = registered, _waits

    def drop(self, numbers: Iterable[int]) -> None:
        """Unregister chunks without further use by copies."""
        for number in numbers:
            registered, _ = self.chunks.pop(number, (False, 0))
            if registered:
                unregister(self.address + number * self.chunk)

    def forget(self) -> None:
        """Unregister all chunks: the memory has no more users and is about to be unmapped."""
        _lent.pop(self.address, None)
        self.drop(list(self.chunks))


_lent: dict[int, Lent] = {}
_waits = 0


def lend(memory: np.ndarray, read_only: bool) -> None:
    """Have memory, uint8, registered chunk by chunk, at the first copy to or from a GPU.

    The lending ends with the array and all tensors and arrays on it, which keep the array alive.
    """
    lent = Lent(*_place(memory), read_only, CHUNK)
    _lent[lent.address] = lent
    weakref.finalize(memory, lent.forget).atexit = False


def is_lent(host: Tensor) -> bool:
    """Whether a tensor of the host lies in lent memory."""
    return _lent_at(host.data_ptr()) is not None


def freed(memory: Tensor | np.ndarray) -> None:
    """Unregister lent memory without further users and without copies under way."""
    address, size = _place(memory)
    if (lent := _lent_at(address)) is not None:
        begin = address - lent.address
        lent.drop(lent.numbers(begin, size))


def waited() -> None:
    """Count a wait; no copy is under way in this process. Unregister long unused chunks.

    Such chunks may be freed already: a reading rank is not told when the lender frees memory.
    """
    global _waits
    _waits += 1
    if _waits % UNUSED == 0:
        for lent in list(_lent.values()):
            lent.drop([number for number, (_, at) in lent.chunks.items() if at <= _waits - UNUSED])


def pieces(device: torch.device, host: Tensor) -> Iterator[slice]:
    """Split the bytes of a contiguous tensor of the host into the stretches of its copies.

    Registers lent chunks not yet registered.
    """
    address, size = _place(host)
    lent = _lent_at(address)
    if lent is None:
        yield slice(0, size)
        return
    begin = address - lent.address
    for number in lent.numbers(begin, size):
        lent.use(device, number)
        first = number * lent.chunk - begin
        yield slice(max(first, 0), min(first + lent.chunk, size))


class Arena:
    """Pinned memory for the sends of a single call; the next call overwrites the memory.

    A request of more than `most` bytes gets ordinary memory, which is not kept.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._memory = torch.empty(0, dtype=torch.uint8)

    def like(self, tensors: list[Tensor]) -> list[Tensor]:
        """Memory of the host for values of such shapes and dtypes, contiguous, of any content."""
        ends = np.cumsum([-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]).tolist()
        memory, total = self._memory, ends[-1] if ends else 0
        if total > len(memory):
            # frees the old memory before the request for the larger memory
            self._memory = memory = torch.empty(0, dtype=torch.uint8)
            room = max(total, min(max(total + total // 4, SMALL), self._most))
            memory = pinned(room, self._most)
            if total <= self._most:
                self._memory = memory
        return [
            memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, first in zip(tensors, [0, *ends])
        ]


_in_use = 0


def pinned(size: int, most: int = MOST_BYTES) -> Tensor:
    """Return uint8 [size], pinned if pinned memory in use then stays within `most` bytes.

    Tensors on the memory keep the memory alive; torch then keeps the memory for the next use. Torch
    takes the next power of two.
    """
    global _in_use
    taken = 1 << max(size - 1, 0).bit_length()
    if taken > most - _in_use:
        return torch.empty(size, dtype=torch.uint8)
    try:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # the system refuses to pin more memory
        return torch.empty(size, dtype=torch.uint8)
    _in_use += taken
    weakref.finalize(memory.untyped_storage(), _given_back, taken).atexit = False
    return memory


def memory_to_send(size: int) -> Tensor:
    """Return uint8 [size] for copies to a GPU without a wait: pinned above SMALL bytes."""
    return torch.empty(size, dtype=torch.uint8) if size <= SMALL else pinned(size)


def pinned_like(tensor: Tensor) -> Tensor:
    """Memory of the host for the values of a tensor, contiguous, of any content."""
    return pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def rows_to_send(rows: int, dim: int) -> Tensor:
    """Return float32 [rows, dim], of any content, from `memory_to_send`."""
    return memory_to_send(4 * rows * dim).view(torch.float32).view(rows, dim)


def _given_back(size: int) -> None:
    global _in_use
    _in_use -= size


def _place(memory: Tensor | np.ndarray) -> tuple[int, int]:
    """The address and the bytes of memory."""
    if isinstance(memory, Tensor):
        return memory.data_ptr(), memory.nbytes
    return memory.ctypes.data, memory.nbytes


def _lent_at(address: int) -> Lent | None:
    return next(
        (one for one in list(_lent.values()) if 0 <= address - one.address < one.size), None
    )


def _bytes_at(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

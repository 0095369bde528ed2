"""Memory of the host that a GPU reads and writes by itself, while the CPU goes on.

Two kinds: memory that is pinned as it is made, kept for the next use; and memory that ranks lend
each other, which is registered with CUDA as it comes into use, in chunks. A chunk is registered no
more once it is freed, or long unused, or before it is unmapped. A copy must not reach from one
registration into the next, so it goes in pieces.
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

from ecrm import imitated_gpu

CHUNK = 16 << 20
"""Bytes that are registered together, and with that handed out by the system."""

MOST_BYTES = 1 << 30
"""Pinned memory that is in use at once, in bytes. What comes on top is ordinary memory."""

SMALL = 1 << 16
"""Bytes up to which CUDA takes what it copies to a GPU with it: not worth pinned memory."""

UNUSED = 256
"""Waits for copies after which a chunk that none of them has used is registered no more."""

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
    """A stretch of memory that ranks lend, in chunks of so many bytes.

    `chunks`: by number, whether it is registered, and how many waits there were when it was used.
    """

    address: int
    size: int
    read_only: bool
    chunk: int
    chunks: dict[int, tuple[bool, int]] = field(default_factory=dict)

    def numbers(self, begin: int, size: int) -> range:
        """The chunks in which bytes lie, by number; `begin` is the place of the first."""
        return range(begin // self.chunk, -(-(begin + size) // self.chunk))

    def use(self, device: torch.device, number: int) -> None:
        """A copy uses a chunk, which is registered if it is not."""
        if number in self.chunks:
            registered, _ = self.chunks[number]
        else:
            first, end = number * self.chunk, min((number + 1) * self.chunk, self.size)
            memory = _bytes_at(self.address + first, end - first)
            registered = register(device, memory, self.read_only)
        self.chunks[number] = registered, _waits

    def drop(self, numbers: Iterable[int]) -> None:
        """No copy uses these chunks any more."""
        for number in numbers:
            registered, _ = self.chunks.pop(number, (False, 0))
            if registered:
                unregister(self.address + number * self.chunk)

    def forget(self) -> None:
        """Nothing uses it any more, and it is about to be unmapped."""
        _lent.pop(self.address, None)
        self.drop(list(self.chunks))


_lent: dict[int, Lent] = {}
_waits = 0


def lend(memory: np.ndarray, read_only: bool) -> None:
    """Have this memory, uint8, registered as it is copied to a GPU or from one.

    That is until the array dies, and all tensors and arrays on it, which keep it alive.
    """
    lent = Lent(*_place(memory), read_only, CHUNK)
    _lent[lent.address] = lent
    weakref.finalize(memory, lent.forget).atexit = False


def is_lent(host: Tensor) -> bool:
    """Whether a tensor of the host lies in lent memory."""
    return _lent_at(host.data_ptr()) is not None


def freed(memory: Tensor | np.ndarray) -> None:
    """Lent memory that nobody uses any more, and that no copy is under way from or to."""
    address, size = _place(memory)
    if (lent := _lent_at(address)) is not None:
        begin = address - lent.address
        lent.drop(lent.numbers(begin, size))


def waited() -> None:
    """No copy is under way in this process. Chunks that were long unused are registered no more.

    They may be freed, which a rank that reads them is not told.
    """
    global _waits
    _waits += 1
    if _waits % UNUSED == 0:
        for lent in list(_lent.values()):
            lent.drop([number for number, (_, at) in lent.chunks.items() if at <= _waits - UNUSED])


def pieces(device: torch.device, host: Tensor) -> Iterator[slice]:
    """The bytes of a contiguous tensor of the host, in stretches that are copied one by one.

    Registers what is lent and has not been registered yet.
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
    """Uint8 [size], pinned if no more than `most` bytes are in use so; torch keeps it for the next.

    Tensors on it keep it alive. Torch takes the next power of two.
    """
    global _in_use
    taken = 1 << max(size - 1, 0).bit_length()
    if taken > most - _in_use:
        return torch.empty(size, dtype=torch.uint8)
    try:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # the system lets no more of it be pinned
        return torch.empty(size, dtype=torch.uint8)
    _in_use += taken
    weakref.finalize(memory.untyped_storage(), _given_back, taken).atexit = False
    return memory


def memory_to_send(size: int) -> Tensor:
    """Uint8 [size], from which a copy to a GPU is not waited for: pinned, if that is worth it."""
    return torch.empty(size, dtype=torch.uint8) if size <= SMALL else pinned(size)


def pinned_like(tensor: Tensor) -> Tensor:
    """Memory of the host for the values of a tensor, contiguous, holding anything."""
    return pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def rows_to_send(rows: int, dim: int) -> Tensor:
    """Float32 [rows, dim], holding anything, of `memory_to_send`."""
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

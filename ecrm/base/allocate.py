"""Where tensors that grow with the tables get their memory."""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CPU = torch.device("cpu")

Allocate = Callable[..., Tensor]
"""(*shape, dtype=np.float32) -> memory for a tensor of that shape."""

UNTOUCHED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Flags of a mapping of which the system counts the pages that are used, and no others.

Python 3.11 does not name the last one of <asm-generic/mman.h>.
"""

FREED_SECONDS = 10.0
"""How long memory of a GPU is asked for. A killed rank's is freed some time after its death."""

_AGAIN_SECONDS = 0.1


class ReusableBuffer:
    """Memory for a matrix of so many `columns`, kept for the next one.

    Where it is too small, `allocate` makes new memory, on `device`. It begins with so many `rows`.
    """

    def __init__(
        self, columns: int, allocate: Allocate, device: torch.device = CPU, rows: int = 0
    ) -> None:
        self._allocate = allocate
        self._memory = allocate(rows, columns) if rows else torch.empty(0, columns, device=device)

    def of(self, rows: int) -> Tensor:
        """Float32 [rows, columns], contiguous, holding anything.

        It is the memory of what the last call returned.
        """
        if rows > len(self._memory):
            self._memory = self._allocate(rows + rows // 4, self._memory.shape[1])
        return self._memory[:rows]


def lazy_zeros(*shape: int, dtype: type = np.float32) -> Tensor:
    """Zeros whose memory the system hands out page by page as it is used.

    torch.zeros writes all of it at once.

    Not np.zeros either: numpy asks for huge pages, of which one row updated takes 2 MiB. Begins at
    a page. Core dumps leave it out: a rank that crashes counts as alive until its dump is written.
    Forks do not have it: pages that both had would be copied as soon as they are written.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, max(size, 1), flags=UNTOUCHED)
    memory.madvise(mmap.MADV_DONTDUMP)
    memory.madvise(mmap.MADV_DONTFORK)
    return torch.from_numpy(np.frombuffer(memory, dtype, count=math.prod(shape)).reshape(shape))


@dataclass(frozen=True)
class ZerosOn:
    """Allocates on a device, where a record is to lie in one row, with padding.

    All memory is real at once, but on the CPU: there it is that of `lazy_zeros`.
    """

    device: torch.device

    def __call__(self, *shape: int, dtype: type = np.float32) -> Tensor:
        """Zeros of that shape. Raises torch.OutOfMemoryError after FREED_SECONDS without."""
        if self.device.type == "cpu":
            return lazy_zeros(*shape, dtype=dtype)
        of_torch = torch.from_numpy(np.empty(0, dtype)).dtype
        last = time.monotonic() + FREED_SECONDS
        while True:
            try:
                return torch.zeros(*shape, dtype=of_torch, device=self.device)
            except torch.OutOfMemoryError:
                if time.monotonic() >= last:
                    raise
            torch.cuda.empty_cache()
            time.sleep(_AGAIN_SECONDS)

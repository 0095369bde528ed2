"""Memory for tensors that grow with the tables."""

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
"""(*shape, dtype=np.float32) -> memory for a tensor of the shape."""

UNTOUCHED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Flags of a mapping for which the system counts only used pages.

Python 3.11 has no name for the last flag, from <asm-generic/mman.h>.
"""

FREED_SECONDS = 10.0
"""Seconds of trying for GPU memory: a killed rank's memory is freed some time after death."""

_AGAIN_SECONDS = 0.1


class ReusableBuffer:
    """Memory for a matrix with `columns` columns, kept for the next matrix.

    If the memory is too small, `allocate` makes new memory. `rows` are allocated at once; without
    rows the buffer begins empty, on `device`.
    """

    def __init__(
        self, columns: int, allocate: Allocate, device: torch.device = CPU, rows: int = 0
    ) -> None:
        self._allocate = allocate
        self._memory = allocate(rows, columns) if rows else torch.empty(0, columns, device=device)

    def of(self, rows: int) -> Tensor:
        """Float32 [rows, columns], contiguous, with arbitrary content.

        The result shares memory with the result of the last call, unless the buffer had to grow.
        """
        if rows > len(self._memory):
            self._memory = self._allocate(rows + rows // 4, self._memory.shape[1])
        return self._memory[:rows]


def lazy_zeros(*shape: int, dtype: type = np.float32) -> Tensor:
    """Zeros whose memory the system hands out page by page on first use.

    torch.zeros writes all the memory at once.

    Not np.zeros either: numpy asks for huge pages, and one updated row takes 2 MiB of huge pages.
    Begins at a page. Core dumps leave the memory out: a crashing rank counts as alive until its
    dump is written. Forked processes do not get the memory: pages shared with a fork would be
    copied on each first write.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, max(size, 1), flags=UNTOUCHED)
    memory.madvise(mmap.MADV_DONTDUMP)
    memory.madvise(mmap.MADV_DONTFORK)
    return torch.from_numpy(np.frombuffer(memory, dtype, count=math.prod(shape)).reshape(shape))


@dataclass(frozen=True)
class ZerosOn:
    """Allocates on a device, with each record in one row, with padding.

    On a GPU all memory is taken at once. On the CPU the memory is from `lazy_zeros`.
    """

    device: torch.device

    def __call__(self, *shape: int, dtype: type = np.float32) -> Tensor:
        """Zeros of the shape. Raises torch.OutOfMemoryError after FREED_SECONDS without memory."""
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

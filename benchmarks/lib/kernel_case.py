"""What the jobs of bench_kernels.py are made of."""

from __future__ import annotations

import ctypes
import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


@dataclass
class Contender:
    """One way to do the job. `prepare` runs before each timed call and is not timed."""

    name: str
    call: Callable[[], None]
    counted_bytes: int
    prepare: Callable[[], None] = lambda: None


@dataclass
class Case:
    """One job; ratios are each contender's time over that of the first."""

    name: str
    rows: int
    row_bytes: int
    contenders: list[Contender]
    result: Callable[[], torch.Tensor]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Memory of every contender: huge pages where the system grants them, from a cache line on."""
    elements = math.prod(shape)
    memory = np.zeros(elements * dtype.itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return (
        torch.from_numpy(memory[start : start + elements * dtype.itemsize])
        .view(dtype)
        .reshape(shape)
    )


def load_isa_l() -> ctypes.CDLL:
    """ISA-L as bundled in the pyeclib wheel."""
    import pyeclib_c

    folder = Path(pyeclib_c.__file__).parent / "pyeclib.libs"
    if not folder.is_dir():
        folder = Path(importlib.metadata.distribution("pyeclib").locate_file("pyeclib.libs"))
    return ctypes.CDLL(str(next(folder.glob("libisal*"))))


class Batches:
    """Sets of distinct random rows, another at every call: their memory is not in the cache."""

    def __init__(self, height: int, touched: int):
        generator = torch.Generator().manual_seed(1)
        self._sets = [torch.randperm(height, generator=generator)[:touched] for _ in range(13)]
        self._turn = 0
        self.rows = self._sets[0]

    def rewind(self) -> None:
        """Begin with the first again."""
        self._turn = 0

    def advance(self) -> None:
        self._turn += 1
        self.rows = self._sets[self._turn % len(self._sets)]

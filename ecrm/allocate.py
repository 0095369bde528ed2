"""Where tensors that grow with the tables get their memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Allocate = Callable[..., Tensor]
"""(*shape, dtype=np.float32) -> memory for a tensor of that shape."""


def lazy_zeros(*shape: int, dtype: type = np.float32) -> Tensor:
    """Zeros whose memory the system hands out page by page as it is used; torch.zeros writes all of it at once.

    Not np.zeros either: numpy asks for huge pages, of which one row updated takes 2 MiB. Begins at a page.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.from_numpy(np.frombuffer(memory, dtype, count=math.prod(shape)).reshape(shape))

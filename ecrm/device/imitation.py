"""The place of an imitated GPU: a double of `ecrm.testing` stands here in place of CUDA.

The double enters by `begin`. The product asks the module about memory and copies alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ecrm.device.copies import Copies

IMITATED_GPU = torch.device("cuda", 0)

registered: dict[int, int] = {}
"""Memory of the host registered with the imitated GPU, or pinned: bytes by address."""

_doubles: list[Callable[[torch.device], Copies]] = []


def begin(copies: Callable[[torch.device], Copies]) -> None:
    """Have `copies` make the copies of this process, until `end`. Calls nest."""
    _doubles.append(copies)


def end() -> None:
    """Undo the last `begin`."""
    _doubles.pop()


def imitating() -> bool:
    """Whether the GPU of this process is imitated."""
    return bool(_doubles)


def imitated_copies() -> Callable[[torch.device], Copies] | None:
    """The maker of an imitated GPU's copies; `None` for a real GPU."""
    return _doubles[-1] if _doubles else None

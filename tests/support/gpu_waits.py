"""Where this project waits for a GPU, imitated or real."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.overrides import TorchFunctionMode

from ecrm.device import imitation
from ecrm.device.copies import StreamCopies
from ecrm.testing import imitated_gpu
from support.paths import ROOT

RESULTS = {"nonzero", "item", "tolist", "__bool__", "__int__", "__float__", "unique"}
"""Functions of torch for whose result a host waits; what the imitated GPU does so for, too."""

COPIES = ("imitated_gpu.py", "copies.py")
"""Modules that wait for others: who has called them is told instead."""


@contextmanager
def waits_for_gpu() -> Iterator[list[str]]:
    """Each wait as "module function", in order: for a copy, or for what is read of a tensor.

    Those of kernels are "kernel function". Of a real GPU, copies count by what they are told, and
    what this thread does alone.

    A copy waits unless it is told not to, and its memory of the host is pinned, or small on its way
    to the GPU. Waits of tests do not count, nor what Triton's interpreter does to imitate a kernel.
    """
    waits: list[str] = []
    waits_then = imitated_gpu.wait_for_gpu

    def noting() -> None:
        if place := _place():
            waits.append(place)
        waits_then()

    def also_noting(copies: StreamCopies) -> None:
        noting()
        streams_wait(copies)

    streams_wait = StreamCopies._wait
    imitated_gpu.wait_for_gpu, StreamCopies._wait = noting, also_noting
    try:
        with _OnRealGpu(noting):
            yield waits
    finally:
        imitated_gpu.wait_for_gpu, StreamCopies._wait = waits_then, streams_wait


class _OnRealGpu(TorchFunctionMode):
    """Tells of what is called on tensors of a GPU that is there, for which the host waits."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(issubclass(kind, imitated_gpu.ImitatedTensor) for kind in types):
            return result
        name = getattr(func, "__name__", "")
        if name in RESULTS and args[0].is_cuda:
            self._tell()
        if name in ("to", "cpu", "copy_") and not kwargs.get("non_blocking"):
            other = args[1] if name == "copy_" else result
            if args[0].is_cuda != other.is_cuda and not imitation.imitating():
                self._tell()
        return result


def _place() -> str:
    """Who waits; "" for none of this project."""
    stack = traceback.extract_stack()
    if any("triton/runtime/" in frame.filename for frame in stack):
        return ""
    for frame in reversed(stack):
        file = Path(frame.filename)
        elsewhere = not file.is_relative_to(ROOT) or ".venv" in file.parts
        if elsewhere or file.name in COPIES or file == Path(__file__):
            continue
        parts = file.relative_to(ROOT).parts
        if "kernels" in parts:
            return f"kernel {frame.name}"
        return f"{file.stem} {frame.name}" if parts[0] == "ecrm" else ""
    return ""

"""Memory of rows and redundancy that the system hands out ahead, not page by page as rows are first written."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Iterable, Sequence

from torch import Tensor

from ecrm.errors import UsageError

_MADV_POPULATE_WRITE = 23  # linux/mman.h
_AT_A_TIME = 4 << 20


class Prefault:
    """`storage.prefault` of one rank: everything at the start, and beside the steps what it takes over later."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def all_of(self, tensors: Iterable[Tensor]) -> None:
        """Have the system hand out every page of `tensors` now; what they hold stays. Raises UsageError where it cannot."""
        for tensor in tensors:
            self._known.add(tensor.data_ptr())
            if tensor.nbytes and _populate(*_pages(tensor)):
                problem = os.strerror(ctypes.get_errno())
                raise UsageError(
                    f"storage.prefault: the system cannot hand out {tensor.nbytes:,} bytes ahead ({problem}): "
                    "it takes as much free memory and Linux 5.14; set storage.prefault=false"
                )

    def beside(self, tensors: Iterable[Tensor]) -> threading.Thread | None:
        """The same for those of `tensors` that are new, in a thread, a piece at a time; where the system cannot, pages come as rows
        are written."""
        new = [tensor for tensor in tensors if tensor.nbytes and tensor.data_ptr() not in self._known]
        self._known.update(tensor.data_ptr() for tensor in new)
        if not new:
            return None
        thread = threading.Thread(target=_by_pieces, args=(new,), name="prefault", daemon=True)
        thread.start()
        return thread


def _by_pieces(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        first, size = _pages(tensor)
        for begin in range(first, first + size, _AT_A_TIME):
            if _populate(begin, min(_AT_A_TIME, first + size - begin)):
                return


def _pages(tensor: Tensor) -> tuple[int, int]:
    """Address of the page that a tensor begins in, and the bytes from there to its end."""
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    return first, tensor.data_ptr() + tensor.nbytes - first


def _populate(first: int, size: int) -> int:
    """0 where the system has handed out these pages."""
    return _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)

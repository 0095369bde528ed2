"""Memory of rows and redundancy, handed out by the system before rows are written."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor

from ecrm.base.errors import UsageError

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # linux/mman.h
_AT_A_TIME = 4 << 20
_REST = 4.0
"""Rest of the thread beside the steps after a piece, in times of the piece."""


class Prefault:
    """`storage.prefault` of one rank: all memory at the start, later the memory of new shards."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Tensor]] = []

    def all_of(self, tensors: Iterable[Tensor]) -> None:
        """Have the system hand out every page of `tensors` now, huge pages if available.

        The contents stay. Raises UsageError if the system cannot hand out the pages.

        Rows in huge pages are found faster, and the memory of a killed process is free again
        sooner.
        """
        for tensor in tensors:
            self._known.append(weakref.ref(tensor))
            if not tensor.nbytes:
                continue
            # a system without huge pages refuses; small pages do as well
            _advise(*_pages(tensor), _MADV_HUGEPAGE)
            if _advise(*_pages(tensor), _MADV_POPULATE_WRITE):
                problem = os.strerror(ctypes.get_errno())
                raise UsageError(
                    f"storage.prefault: the system cannot hand out {tensor.nbytes:,} bytes "
                    f"ahead ({problem}), "
                    "which takes as much free memory and Linux 5.14",
                    {"storage.prefault": False},
                )

    def beside(self, tensors: Iterable[Tensor]) -> threading.Thread | None:
        """Hand out the pages of new `tensors` in a thread, a piece at a time.

        The thread goes on with a tensor as long as other code holds the tensor. If the system
        cannot hand out pages ahead, pages come as rows are written. Returns the thread, if any.
        """
        self._known = [known for known in self._known if known() is not None]
        new = [
            weakref.ref(tensor)
            for tensor in tensors
            if tensor.nbytes and not any(known() is tensor for known in self._known)
        ]
        if not new:
            return None
        self._known += new
        thread = threading.Thread(target=_by_pieces, args=(new,), name="prefault", daemon=True)
        thread.start()
        return thread


def _by_pieces(tensors: Sequence[weakref.ref[Tensor]]) -> None:
    for known in tensors:
        done, failed = 0, 0
        while not failed and (tensor := known()) is not None:
            first, size = _pages(tensor)
            if done >= size:
                break
            began = time.monotonic()
            failed = _advise(first + done, min(_AT_A_TIME, size - done), _MADV_POPULATE_WRITE)
            done += _AT_A_TIME
            del tensor  # held for a piece only
            time.sleep(_REST * (time.monotonic() - began))


def _pages(tensor: Tensor) -> tuple[int, int]:
    """Address of the first page of a tensor, and the bytes from the address to the tensor's end."""
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    return first, tensor.data_ptr() + tensor.nbytes - first


def _advise(first: int, size: int, advice: int) -> int:
    """0 if the system has taken the advice on the pages.

    With _MADV_POPULATE_WRITE the system has then handed out the pages.
    """
    return int(_libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)

"""Memory of rows and redundancy that the system hands out before rows are written."""

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

from ecrm.errors import UsageError

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # linux/mman.h
_AT_A_TIME = 4 << 20
_REST = 4.0
"""How long a thread beside the steps rests after a piece, in times of the piece."""


class Prefault:
    """`storage.prefault` of one rank: all at the start, later what it takes over."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Tensor]] = []

    def all_of(self, tensors: Iterable[Tensor]) -> None:
        """Have the system hand out every page of `tensors` now, huge ones where it has them.

        What they hold stays. Raises UsageError where it cannot.

        Rows in huge pages are found faster, and the memory of a killed process is free again
        sooner.
        """
        for tensor in tensors:
            self._known.append(weakref.ref(tensor))
            if not tensor.nbytes:
                continue
            # refused by a system without them, whose pages do as well
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
        """The same for new ones of `tensors`, in a thread, a piece at a time.

        It goes on as long as somebody else holds them. Where the system cannot, pages come as rows
        are written.
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
    """Address of the page that a tensor begins in, and the bytes from there to its end."""
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    return first, tensor.data_ptr() + tensor.nbytes - first


def _advise(first: int, size: int, advice: int) -> int:
    """0 where the system has taken the advice on these pages.

    With _MADV_POPULATE_WRITE it has then handed them out.
    """
    return int(_libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)

"""Memory of this process: the allocator's treatment of a step's buffers, and Linux's counts."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch

from ecrm.transport.shared_memory import SharedMemory

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_LARGE = 1 << 30
_LARGE_BEFORE_GLIBC_2_35 = 32 << 20
_PAD = 64 << 20
# plus the pad less than _LARGE: from _LARGE on freed memory goes back to the system
_IN_HUGE_PAGES = 768 << 20
_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14  # linux/mman.h


def keep_freed_memory() -> None:
    """Let freed memory stay with the process, for use again in the next step.

    The next 768 MiB of allocations lie in huge pages. By default glibc gives buffers of more than
    128 KiB to 32 MiB back to the system at once, and every step pays for zeroing and mapping all
    pages of the buffers again. Without effect with a C library other than glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if not mallopt(_MMAP_THRESHOLD, _LARGE):
        mallopt(_MMAP_THRESHOLD, _LARGE_BEFORE_GLIBC_2_35)
    mallopt(_TRIM_THRESHOLD, _LARGE)
    mallopt(_TOP_PAD, _PAD)
    _prepare_huge_pages()


def _prepare_huge_pages() -> None:
    """Have glibc take address space to hand out from now on, in huge pages once touched.

    Rows in huge pages are found faster. Other ranks copy messages out of huge pages without a
    look-up by the system per 4 KiB. Without effect on a system without huge pages, or without such
    space.
    """
    c = ctypes.CDLL(None)
    c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    c.free.argtypes, c.madvise.argtypes = (
        [ctypes.c_void_p],
        [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int],
    )
    block = c.malloc(_IN_HUGE_PAGES)
    if block:
        start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        c.madvise(
            start, (block + _IN_HUGE_PAGES - start) // mmap.PAGESIZE * mmap.PAGESIZE, _MADV_HUGEPAGE
        )
        c.free(block)


def have_free_memory(size: int) -> None:
    """Have the system hand out `size` bytes now, and free the bytes in one piece.

    After `keep_freed_memory` the next buffers are made in the freed piece. Without effect above 32
    MiB before glibc 2.35.
    """
    torch.ones(size, dtype=torch.uint8)


def resident_bytes(shared_memory: SharedMemory | None) -> tuple[int, int]:
    """(resident now, largest resident set ever) of this process, in bytes.

    The first is anonymous memory plus this process's own `shared_memory`. The second also includes
    libraries, and pages read of other ranks' shared memory.
    """
    kibibytes = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("RssAnon", "VmHWM"):
            kibibytes[name] = int(rest.split()[0])
    own = 0 if shared_memory is None else shared_memory.bytes_used
    return kibibytes["RssAnon"] * 1024 + own, kibibytes["VmHWM"] * 1024

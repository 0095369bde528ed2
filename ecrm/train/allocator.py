"""How the C library's allocator treats the large, short-lived buffers of a step."""

from __future__ import annotations

import ctypes

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_LARGE = 1 << 30
_LARGE_BEFORE_GLIBC_2_35 = 32 << 20
_PAD = 64 << 20


def keep_freed_memory() -> None:
    """Let freed memory stay with the process, to be used again in the next step.

    By default glibc gives buffers of more than 128 KiB to 32 MiB back to the system at once, and every step pays
    for having each of their pages zeroed and mapped again. Without effect where the C library is another one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if not mallopt(_MMAP_THRESHOLD, _LARGE):
        mallopt(_MMAP_THRESHOLD, _LARGE_BEFORE_GLIBC_2_35)
    mallopt(_TRIM_THRESHOLD, _LARGE)
    mallopt(_TOP_PAD, _PAD)


def have_free_memory(size: int) -> None:
    """Have the system hand out `size` bytes now, and free them in one piece: what the next buffers are made in, after `keep_freed_memory`.
    Without effect above 32 MiB before glibc 2.35."""
    torch.ones(size, dtype=torch.uint8)

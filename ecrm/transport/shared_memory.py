"""Memory of a rank that other ranks of its host read in place, without a copy.

The memory is an unnamed file in memory: the file lasts until the last process with a mapping ends,
however processes end, and memory shared by a dead rank stays readable. Core dumps leave the memory
out, of owners and of readers: a dump has the system hand out every page of the memory, and a rank
counts as alive until its dump is written. Other ranks reach the file through its number among the
open files of the owner (`/proc/PID/fd/NUMBER`), which needs the same user.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import resource
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecrm.base.allocate import lazy_zeros
from ecrm.device.pinned import freed, lend

ADDRESS_SPACE = 4
"""Addresses set aside for a rank's shared memory, in times of this machine's memory.

Addresses are not memory. A rank may share three times its rows plus the rows' memory of a step, and
never uses addresses again after giving up a shard.
"""

ADDRESSES = 1 << 45
"""Most addresses set aside among all ranks, since each rank maps the memory of all ranks.

A process has 2^47 addresses on most machines.
"""


class OwnMemory:
    """The memory that a rank can share.

    Raises OSError if the system gives no such memory, or limits the addresses.
    """

    def __init__(self, ranks: int) -> None:
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            raise OSError("addresses are limited (ulimit -v)")
        self.size = (
            min(ADDRESS_SPACE * os.sysconf("SC_PHYS_PAGES"), ADDRESSES // ranks // mmap.PAGESIZE)
            * mmap.PAGESIZE
        )
        self.file = os.memfd_create("ecrm")
        try:
            os.ftruncate(self.file, self.size)
            self._map = mmap.mmap(self.file, self.size)
            self._map.madvise(mmap.MADV_DONTDUMP)
        except OSError:
            os.close(self.file)
            raise
        self.memory = np.frombuffer(self._map, np.uint8)
        lend(self.memory, read_only=False)
        self._address = self.memory.ctypes.data
        self._used = 0
        self._freed: list[tuple[int, int, int]] = []  # (calls completed by then, first byte, bytes)
        self._calls = 0

    @property
    def bytes_used(self) -> int:
        """Bytes handed out by the system."""
        return os.fstat(self.file).st_blocks * 512

    def allocate(self, *shape: int, dtype: type = np.float32) -> Tensor:
        """Zeros of a shape, as `lazy_zeros`; ordinary memory once addresses are used up."""
        count = math.prod(shape)
        size = -(-max(count * np.dtype(dtype).itemsize, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._used + size > self.size:
            return lazy_zeros(*shape, dtype=dtype)
        start, self._used = self._used, self._used + size
        array: np.ndarray = np.frombuffer(self._map, dtype, count=count, offset=start)
        weakref.finalize(array, self._free, start, size).atexit = False
        return torch.from_numpy(array).view(shape)

    def ahead(self, size: int) -> Tensor:
        """The next `size` bytes to be allocated, or as many as are left, uint8.

        Callers can have the system hand out these pages early.
        """
        return torch.from_numpy(self.memory[self._used : self._used + size])

    def offset(self, tensor: Tensor) -> int | None:
        """The offset of a contiguous tensor in this memory; `None` for a tensor elsewhere."""
        offset = tensor.data_ptr() - self._address
        return offset if 0 <= offset < self.size else None

    def completed(self) -> None:
        """Note that this rank has completed an exchange or share, entered by every other rank.

        Memory freed before the last two such calls is given back to the system.
        """
        self._calls += 1
        while self._freed and self._freed[0][0] + 2 <= self._calls:
            _, start, size = self._freed.pop(0)
            freed(self.memory[start : start + size])  # registered pages would stay
            with contextlib.suppress(OSError):  # on failure the memory stays
                self._map.madvise(mmap.MADV_REMOVE, start, size)

    def shrunk(self) -> None:
        """Note a shrink: memory freed before counts as freed now."""
        for place, (_, start, size) in enumerate(self._freed):
            self._freed[place] = self._calls, start, size

    def _free(self, start: int, size: int) -> None:
        """Note bytes without users in this process; other ranks may still use the bytes.

        Other ranks use rows and gradients until they enter the next exchange, and deltas until they
        have undone or committed the deltas. A rank that enters an exchange or share after the
        agreement on the commit has done so where the agreement was True on every rank, as over MPI.
        Over links a failure may stand beside True. A rank with the failure fails in the next call
        too, commits after the first exchange of the recovery, and enters the second one afterwards.
        So the count of two calls begins anew at a shrink.
        """
        self._freed.append((self._calls, start, size))


class SharedMemory:
    """The memory shared by a rank, and the readable memory of other ranks.

    `readers` are the ranks able to read this rank's memory, `shared_bytes` counts the message bytes
    saved by sharing.

    `readers` is empty before `share_with`. A rank without memory to share never shares.
    """

    def __init__(self, ranks: int) -> None:
        """`ranks` is the number of all ranks."""
        self._own: OwnMemory | None = None
        with contextlib.suppress(OSError):
            self._own = OwnMemory(ranks)
        self._of: dict[int, np.ndarray] = {}
        self.readers: frozenset[int] = frozenset()
        self.shared_bytes = 0

    @property
    def bytes_used(self) -> int:
        """Bytes handed out by the system for the memory that this rank can share."""
        return 0 if self._own is None else self._own.bytes_used

    def allocate(self, *shape: int, dtype: type = np.float32) -> Tensor:
        """As `Transport.allocate_shared`."""
        return (
            lazy_zeros(*shape, dtype=dtype)
            if self._own is None
            else self._own.allocate(*shape, dtype=dtype)
        )

    def ahead(self, size: int) -> Tensor:
        """As `OwnMemory.ahead`; empty for a rank without memory to share."""
        return torch.empty(0, dtype=torch.uint8) if self._own is None else self._own.ahead(size)

    def offer(self, host: str) -> dict[str, Any]:
        """Return the data another rank of `host` needs to read the memory of this rank.

        Values are JSON values; empty for a rank without memory to share.
        """
        if self._own is None:
            return {}
        return {
            "system": _system(host),
            "pid": os.getpid(),
            "file": self._own.file,
            "inode": os.fstat(self._own.file).st_ino,
            "bytes": self._own.size,
        }

    def accept(self, host: str, offers: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """Map the offered memory of ranks; return all ranks with memory readable from now on.

        Memory of a rank that is mapped already stays as it is.
        """
        for rank in offers.keys() - self._of.keys():
            offer = offers[rank]
            memory = _opened(offer) if offer and offer["system"] == _system(host) else None
            if memory is not None:
                self._of[rank] = memory
        return sorted(self._of)

    def share_with(self, readers: Collection[int]) -> None:
        """Set the ranks that have accepted this rank's offer."""
        self.readers = frozenset(readers)

    def offset(self, tensor: Tensor) -> int | None:
        """The offset of a contiguous tensor in this rank's shared memory.

        `None` for a tensor elsewhere.
        """
        return None if self._own is None else self._own.offset(tensor)

    @property
    def memory(self) -> np.ndarray | None:
        """All memory that this rank can share, uint8; `None` without such memory."""
        return None if self._own is None else self._own.memory

    def memory_of(self, rank: int) -> np.ndarray | None:
        """The memory of another rank, uint8, read-only; `None` if unreadable."""
        return self._of.get(rank)

    def keep(self, live: Collection[int]) -> None:
        """Note a shrink: forget the memory of ranks outside `live`, and share with them no more.

        The memory goes once unused in this process.
        """
        self._of = {rank: memory for rank, memory in self._of.items() if rank in live}
        self.readers = self.readers.intersection(live)
        if self._own is not None:
            self._own.shrunk()

    def completed(self) -> None:
        """As `OwnMemory.completed`."""
        if self._own is not None:
            self._own.completed()


def _system(host: str) -> list[Any]:
    """An identity of the system, equal for ranks able to find each other's open files."""
    try:
        return [
            host,
            Path("/proc/sys/kernel/random/boot_id").read_text(),
            os.stat("/proc/self/ns/pid").st_ino,
        ]
    except OSError:
        return [host, os.getpid()]  # equal to no other rank's


def _opened(offer: Mapping[str, Any]) -> np.ndarray | None:
    """Map the offered memory, uint8; writing to the memory is a segmentation fault.

    `None` if the system refuses this process the memory.
    """
    try:
        file = os.open(f"/proc/{offer['pid']}/fd/{offer['file']}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_ino != offer["inode"]:
                return None
            mapped = mmap.mmap(file, offer["bytes"])
        finally:
            os.close(file)
        mapped.madvise(mmap.MADV_DONTDUMP)
    except OSError:
        return None
    memory = np.frombuffer(mapped, np.uint8)
    # Mapped writable at first, since torch warns of read-only arrays.
    protected = ctypes.CDLL(None).mprotect(
        ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.size), mmap.PROT_READ
    )
    if protected != 0:
        return None
    lend(memory, read_only=True)
    return memory

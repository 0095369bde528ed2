"""Memory of one rank that other ranks of its host read where it lies, without a copy.

It is a file in memory without a name: it is gone with the last process that has it, however these
end, and what a rank that dies has shared can be read all the same. Core dumps leave it out, owners'
and readers': a dump has the system hand out every page of it, and a rank counts as alive until its
dump is written. Others reach it through its number among the open files of its process
(`/proc/PID/fd/NUMBER`), which takes the same user.
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
from ecrm.transport.pinned import freed, lend

ADDRESS_SPACE = 4
"""Addresses set aside for a rank's shared memory, in times of this machine's memory.

Addresses are not memory. A rank may share three times its rows and what a step needs of them, and
addresses are not used again when a shard is given up.
"""

ADDRESSES = 1 << 45
"""And no more than this among all ranks, since each maps the memory of all others.

A process has 2^47 addresses on most machines.
"""


class OwnMemory:
    """The memory that a rank can share.

    Raises OSError where the system gives no such memory, or limits the addresses.
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
        """Bytes that the system has handed out."""
        return os.fstat(self.file).st_blocks * 512

    def allocate(self, *shape: int, dtype: type = np.float32) -> Tensor:
        """Zeros of that shape, as `lazy_zeros`; ordinary memory once addresses are used up."""
        count = math.prod(shape)
        size = -(-max(count * np.dtype(dtype).itemsize, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._used + size > self.size:
            return lazy_zeros(*shape, dtype=dtype)
        start, self._used = self._used, self._used + size
        array: np.ndarray = np.frombuffer(self._map, dtype, count=count, offset=start)
        weakref.finalize(array, self._free, start, size).atexit = False
        return torch.from_numpy(array).view(shape)

    def ahead(self, size: int) -> Tensor:
        """The next `size` bytes that will be allocated, or as many as are left, uint8.

        The system can be made to hand them out before.
        """
        return torch.from_numpy(self.memory[self._used : self._used + size])

    def offset(self, tensor: Tensor) -> int | None:
        """Where a contiguous tensor begins in this memory; None where it is not in it."""
        offset = tensor.data_ptr() - self._address
        return offset if 0 <= offset < self.size else None

    def completed(self) -> None:
        """This rank has completed an exchange or share, which every other rank has entered.

        After two of them, what was freed before is given back.
        """
        self._calls += 1
        while self._freed and self._freed[0][0] + 2 <= self._calls:
            _, start, size = self._freed.pop(0)
            freed(self.memory[start : start + size])  # what is registered stays
            with contextlib.suppress(OSError):  # then it stays
                self._map.madvise(mmap.MADV_REMOVE, start, size)

    def _free(self, start: int, size: int) -> None:
        """Nobody here uses these bytes any more, but others may.

        They use rows and gradients until they enter the next exchange, and deltas until they have
        taken them back or committed them. That is when they next exchange or share anything behind
        an agreement on it, since agreements of MPI are uniform.
        """
        self._freed.append((self._calls, start, size))


class SharedMemory:
    """What a rank shares, and what it can read of others.

    `readers` are the ranks that can read its memory, `shared_bytes` is how much they were sent so.

    None can before `share_with`. Where this rank has no memory to share, all is as if nobody could.
    """

    def __init__(self, ranks: int) -> None:
        """`ranks` is how many there are in all."""
        self._own: OwnMemory | None = None
        with contextlib.suppress(OSError):
            self._own = OwnMemory(ranks)
        self._of: dict[int, np.ndarray] = {}
        self.readers: frozenset[int] = frozenset()
        self.shared_bytes = 0

    @property
    def bytes_used(self) -> int:
        """Bytes of memory that the system has handed out for what this rank can share."""
        return 0 if self._own is None else self._own.bytes_used

    def allocate(self, *shape: int, dtype: type = np.float32) -> Tensor:
        """As `Transport.allocate_shared`."""
        return (
            lazy_zeros(*shape, dtype=dtype)
            if self._own is None
            else self._own.allocate(*shape, dtype=dtype)
        )

    def ahead(self, size: int) -> Tensor:
        """As `OwnMemory.ahead`; empty where this rank has no memory to share."""
        return torch.empty(0, dtype=torch.uint8) if self._own is None else self._own.ahead(size)

    def offer(self, host: str) -> dict[str, Any]:
        """What another rank of `host` needs to read the memory of this one.

        As JSON has it; empty where there is none.
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
        """The ranks, of those that offer theirs, whose memory this rank can read from now on."""
        for rank, offer in offers.items():
            memory = _opened(offer) if offer and offer["system"] == _system(host) else None
            if memory is not None:
                self._of[rank] = memory
        return sorted(self._of)

    def share_with(self, readers: Collection[int]) -> None:
        """These ranks have accepted."""
        self.readers = frozenset(readers)

    def offset(self, tensor: Tensor) -> int | None:
        """Where a contiguous tensor begins in this rank's shared memory.

        None where it is elsewhere.
        """
        return None if self._own is None else self._own.offset(tensor)

    @property
    def memory(self) -> np.ndarray | None:
        """All that this rank can share, uint8; None where it has no such memory."""
        return None if self._own is None else self._own.memory

    def memory_of(self, rank: int) -> np.ndarray | None:
        """The memory of another rank, uint8, not to be written; None where it cannot be read."""
        return self._of.get(rank)

    def keep(self, live: Collection[int]) -> None:
        """Only these ranks are left: others' memory is gone once nothing here uses it."""
        self._of = {rank: memory for rank, memory in self._of.items() if rank in live}

    def completed(self) -> None:
        """As `OwnMemory.completed`."""
        if self._own is not None:
            self._own.completed()


def _system(host: str) -> list[Any]:
    """What ranks have in common that can find one another's open files."""
    try:
        return [
            host,
            Path("/proc/sys/kernel/random/boot_id").read_text(),
            os.stat("/proc/self/ns/pid").st_ino,
        ]
    except OSError:
        return [host, os.getpid()]  # as nobody else


def _opened(offer: Mapping[str, Any]) -> np.ndarray | None:
    """The memory that was offered, uint8; writing to it is a segmentation fault.

    None where the system does not let this process have it.
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
    # Not mapped so from the beginning, since torch warns of arrays that cannot be written.
    protected = ctypes.CDLL(None).mprotect(
        ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.size), mmap.PROT_READ
    )
    if protected != 0:
        return None
    lend(memory, read_only=True)
    return memory

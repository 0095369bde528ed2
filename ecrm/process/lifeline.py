"""A lock that tells at once when a process is dying.

The lock is a robust lock in shared memory, held by the main thread of the process for life. A
waiter gets the lock when the main thread ends. Other threads of the process may still be in a last
system call.

waitpid learns of a killed process when the system has taken all memory of the process back: 85 ms
for each GiB of pages of 4 KiB, seconds for a rank with large tables. The system hands on robust
locks of an ending thread earlier (set_robust_list(2), pthread_mutexattr_setrobust(3)).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable
from threading import Thread

_PROCESS_SHARED, _ROBUST = 1, 1  # pthread.h
_ATTRIBUTES_BYTES = 64
"""More than a pthread_mutexattr_t of any system has."""


class Lifeline:
    """The lock of a rank, in memory that guard and rank share.

    The guard calls `begin` before the rank is there. The rank calls `hold` at once. The guard calls
    `watch` after the rank's `hold`.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._lock = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)))

    def begin(self) -> None:
        """Make the lock."""
        attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
        self._call("pthread_mutexattr_init", attributes)
        self._call("pthread_mutexattr_setpshared", attributes, _PROCESS_SHARED)
        self._call("pthread_mutexattr_setrobust", attributes, _ROBUST)
        self._call("pthread_mutex_init", self._lock, attributes)

    def hold(self) -> None:
        """Lock, in the main thread of the rank; never unlocked."""
        self._call("pthread_mutex_lock", self._lock)

    def watch(self, tell: Callable[[], object]) -> None:
        """Have `tell` called, in a thread, as soon as the holding process is dying."""
        Thread(target=self._wait, args=(tell,), name="lifeline", daemon=True).start()

    def _wait(self, tell: Callable[[], object]) -> None:
        if (
            self._call("pthread_mutex_lock", self._lock, allowed=errno.EOWNERDEAD)
            == errno.EOWNERDEAD
        ):
            tell()

    @staticmethod
    def _call(name: str, *arguments: object, allowed: int = 0) -> int:
        result: int = getattr(ctypes.CDLL(None), name)(*arguments)
        if result not in (0, allowed):
            raise OSError(result, f"{name}: {errno.errorcode.get(result, 'failed')}")
        return result

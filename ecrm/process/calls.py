"""Count a rank's calls to other ranks, in a word of memory shared with the rank's guard.

Inside a call the rank may wait for other ranks without limit. A rank outside of calls that never
comes to the next call computes for ever, or hangs in a system call.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator


class CallCount:
    """The count, in `memory` of at least 16 bytes.

    The count is 0 before the first call, odd inside a call, and even after a call. `awaited` says
    whether the next call is expected soon: False while a script prepares its data, or works after
    its loop.
    """

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        """Without `memory` the count is this process's own, shared with processes forked later."""
        self._word = memoryview(mmap.mmap(-1, 16) if memory is None else memory).cast("Q")
        self.awaited = True

    @property
    def awaited(self) -> bool:
        """Whether a rank without calls counts as stuck."""
        return bool(self._word[1])

    @awaited.setter
    def awaited(self, is_: bool) -> None:
        self._word[1] = is_

    @property
    def count(self) -> int:
        """The present count."""
        return self._word[0]

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Count a call: the body of the `with` is the call."""
        self._word[0] += 1
        try:
            yield
        finally:
            self._word[0] += 1


class Stuck:
    """The guard's side: tells when the rank has been outside of calls for `stuck_seconds`.

    0 seconds: never. Call `look()` now and then.
    """

    def __init__(self, calls: CallCount, stuck_seconds: float, clock: Callable[[], float]) -> None:
        self._calls, self.seconds, self._clock = calls, stuck_seconds, clock
        self._seen, self._since = (0, True), clock()

    def look(self) -> bool:
        """Whether to give up the rank."""
        count, awaited, now = self._calls.count, self._calls.awaited, self._clock()
        if (count, awaited) != self._seen:
            self._seen, self._since = (count, awaited), now
        outside = awaited and count > 0 and count % 2 == 0
        return outside and 0 < self.seconds <= now - self._since

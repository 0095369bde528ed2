"""Counts a rank's calls to other ranks, in a word of memory that it shares with its guard.

Inside such a call the rank may wait for others for as long as it takes. A rank outside of it that
does not come to the next one computes for ever, or stands in a call of the system that does not
return.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator


class Calls:
    """The count, shared with processes that are forked later.

    It is 0 before the first call, odd inside a call, and even after it.
    """

    def __init__(self) -> None:
        self._word = memoryview(mmap.mmap(-1, 8)).cast("Q")

    @property
    def count(self) -> int:
        """What the word says now."""
        return self._word[0]

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around a call."""
        self._word[0] += 1
        try:
            yield
        finally:
            self._word[0] += 1


class Stuck:
    """The guard's side: tells when the rank has been outside of calls for `stuck_seconds`.

    0 seconds: never. Call `look()` now and then.
    """

    def __init__(self, calls: Calls, stuck_seconds: float, clock: Callable[[], float]) -> None:
        self._calls, self.seconds, self._clock = calls, stuck_seconds, clock
        self._seen, self._since = 0, clock()

    def look(self) -> bool:
        """Whether the rank is to be given up."""
        count, now = self._calls.count, self._clock()
        if count != self._seen:
            self._seen, self._since = count, now
        outside = count > 0 and count % 2 == 0
        return outside and 0 < self.seconds <= now - self._since

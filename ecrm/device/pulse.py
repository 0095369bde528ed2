"""The pulse of a GPU: the rank asks now and then, the GPU answers, and the rank's guard watches.

A hanging kernel leaves the rank in a wait without end, and no line of Python may run. The answer is
therefore a word in memory shared by rank and guard, and the GPU itself writes the word, in order
with the work given to the GPU.

This module does not import torch, since guards do not.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

ASKS_EACH_LIMIT = 8
"""Questions of a rank within the time allowed to a GPU for an answer."""


def _nothing() -> None:
    """Default for `Pulse.ask`."""


class Pulse:
    """Two words: the number of questions asked, and the last question answered.

    The words are in `memory`, a page; without `memory`, in a page of this process. A GPU may take
    `limit_seconds` for an answer.
    """

    def __init__(self, limit_seconds: float, memory: mmap.mmap | None = None) -> None:
        self.memory = mmap.mmap(-1, mmap.PAGESIZE) if memory is None else memory
        self.limit_seconds = limit_seconds
        self.ask: Callable[[], None] = _nothing
        """Ask the GPU, before the rank waits for the GPU. Does nothing without a GPU."""
        self._words = memoryview(self.memory).cast("q")

    @property
    def asked(self) -> int:
        return self._words[0]

    @property
    def answered(self) -> int:
        return self._words[1]

    def question(self) -> int:
        """Count a question; return the question's number, the expected answer."""
        self._words[0] += 1
        return self._words[0]


class Unanswered:
    """The guard's side: tells when the GPU has not answered for `pulse.limit_seconds`.

    Call `look()` now and then. The time begins at the first look that sees the question: time
    without a core for the guard does not count.
    """

    def __init__(self, pulse: Pulse, clock: Callable[[], float]) -> None:
        self._pulse, self._clock = pulse, clock
        self.limit_seconds = pulse.limit_seconds
        self._seen = (False, 0)
        self._since = clock()

    def look(self) -> bool:
        """Whether to give up the rank."""
        answered, now = self._pulse.answered, self._clock()
        seen = (self._pulse.asked > answered, answered)
        if seen != self._seen:
            self._seen, self._since = seen, now
        return seen[0] and now - self._since >= self.limit_seconds

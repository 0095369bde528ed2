"""The pulse of a GPU: a rank asks now and then, the GPU answers, and the rank's guard looks on.

A kernel that hangs leaves its rank in a wait that never returns, in which no line of Python may
run. So the answer is a word in memory that rank and guard share, and the GPU itself writes it, once
it has come so far in what it was given.

This module does without torch, since guards do.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

ASKS_EACH_LIMIT = 8
"""How often a rank asks in the time that a GPU may take for an answer."""


def _nothing() -> None:
    """Default for asking."""


class Pulse:
    """The words: how often was asked, and which question was answered last.

    Shared with processes that are forked later. A GPU may take `limit_seconds` for an answer.
    """

    def __init__(self, limit_seconds: float) -> None:
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.limit_seconds = limit_seconds
        self.ask: Callable[[], None] = _nothing
        """Ask the GPU, as its rank does before it waits for it. Nothing where there is no GPU."""
        self._words = memoryview(self.memory).cast("q")

    @property
    def asked(self) -> int:
        return self._words[0]

    @property
    def answered(self) -> int:
        return self._words[1]

    def question(self) -> int:
        """Count a question; its number is the answer to it."""
        self._words[0] += 1
        return self._words[0]


class Unanswered:
    """The guard's side: tells when the GPU has not answered for `pulse.limit_seconds`.

    Call `look()` now and then. The time begins at the look that first sees the question: a guard
    that gets no core for a while does not count it.
    """

    def __init__(self, pulse: Pulse, clock: Callable[[], float]) -> None:
        self._pulse, self._clock = pulse, clock
        self.limit_seconds = pulse.limit_seconds
        self._seen = (False, 0)
        self._since = clock()

    def look(self) -> bool:
        """Whether the rank is to be given up."""
        answered, now = self._pulse.answered, self._clock()
        seen = (self._pulse.asked > answered, answered)
        if seen != self._seen:
            self._seen, self._since = seen, now
        return seen[0] and now - self._since >= self.limit_seconds

"""A clock that stands still until an event is due."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class VirtualTime:
    """Events in the order of their times; `now` is the time of the last event, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = itertools.count()

    def at(self, time: float, act: Callable[..., object], *arguments: Any) -> None:
        """Call `act` at a time, or at once if the time is over."""
        heapq.heappush(self._events, (time, next(self._count), act, arguments))

    def after(self, seconds: float, act: Callable[..., object], *arguments: Any) -> None:
        """Call `act` after so many seconds."""
        self.at(self.now + seconds, act, *arguments)

    def advance(self) -> bool:
        """Go to the next event, and call it. Returns whether there was one."""
        if not self._events:
            return False
        time, _, act, arguments = heapq.heappop(self._events)
        self.now = max(self.now, time)
        act(*arguments)
        return True

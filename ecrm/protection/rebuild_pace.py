"""The number of rows rebuilt beside a step, within a share of the time of steps. Pure.

Rebuilding slows steps in two ways. Rows asked for by steps come back at once, in any number: no
choice is left. Background rows are a choice. Two of six steps rebuild no row in the background. So
each rank knows three times of steps: with no shard rebuilding, with the rows asked for, and with
background rows besides. The share is for both ways together: background rows get the rest of the
share, but LEAST_PART of the share at least.

Rows of a step are chosen in the step before: only the first of the two steps does no work for
background rows. The number of rows never changes a row: a rank may choose alone.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

FIRST_ROWS = 512
"""Rows of the first rounds, before any step is measured."""
LEAST_ROWS = 64
"""Rows of a round, at least: a slow spell of a machine must not end a rebuild."""
MOST_BYTES = 1 << 26
"""Bytes of recovered records of a round: bounds the memory of messages."""
PERIOD, BUSY = 6, 4
"""The first BUSY of PERIOD steps rebuild rows in the background."""
WINDOW = 24
"""Steps measured before the number of rows changes."""
FACTOR = 2.0
"""The number of rows changes by this factor, at most, from window to window."""
WINDOWS = 4
"""Windows for the time of a row: the last ones."""
USUAL = 96
"""Steps without any rebuilding for the usual time of a step: the last ones."""
LEAST_PART = 0.5
"""Part of the share for background rows, at least: a rebuild must end, also beside slow steps."""


def most_rows(most: int, record_bytes: int) -> int:
    """The bound of rows: `most`, or for 0 the rows of MOST_BYTES."""
    return most or max(LEAST_ROWS, MOST_BYTES // record_bytes)


class RebuildPace:
    """Chooses the background rows of each rebuilding shard, step by step.

    `share` is the share of time for rebuilding, above 0 and up to 1: with 1 every step takes as
    many rows as are allowed, and no step is measured. Allowed are `most_rows`.
    """

    def __init__(self, share: float, most: int, record_bytes: int) -> None:
        self._most = most_rows(most, record_bytes)
        self._measures = share < 1
        # the time of rebuilding over the time of the rest of a step
        self._allowed = share / (1 - share) if self._measures else math.inf
        self._rows = min(FIRST_ROWS, self._most) if self._measures else self._most
        self._calm: list[float] = []
        self._busy: list[float] = []
        self._steps = 0
        self._costs: deque[tuple[float, int]] = deque(maxlen=WINDOWS)
        self._usual: deque[float] = deque(maxlen=USUAL)

    def rows(self, step: int) -> int:
        """Background rows of each rebuilding shard in a step."""
        return 0 if self._measures and step % PERIOD >= BUSY else self._rows

    def stepped(self, step: int, seconds: float) -> None:
        """Take the time of a finished step with `rows(step)` rows."""
        self._steps += 1
        if step % PERIOD == BUSY:
            self._calm.append(seconds)
        elif step % PERIOD < BUSY:
            self._busy.append(seconds)
        if self._measures and self._steps >= WINDOW:
            self._choose()
            self.interrupted()

    def undisturbed(self, seconds: float) -> None:
        """Take the time of a finished step with no shard rebuilding on any rank."""
        self._usual.append(seconds)
        self.interrupted()

    def interrupted(self) -> None:
        """Forget the steps of the window: a step was no usual step."""
        self._calm, self._busy, self._steps = [], [], 0

    def _choose(self) -> None:
        """Choose the number of rows from the time of a row in the last windows."""
        if not self._calm or not self._busy:
            return
        calm = statistics.median(self._calm)
        self._costs.append((statistics.median(self._busy) - calm, self._rows))
        seconds = sum(more for more, _ in self._costs)
        rows = sum(rows for _, rows in self._costs)
        # only some steps of a period take time for background rows
        time = self._time(calm) * PERIOD / BUSY
        wanted = time * rows / seconds if seconds > 0 else math.inf
        bounded = min(max(wanted, self._rows / FACTOR), self._rows * FACTOR)
        self._rows = min(max(int(bounded), min(LEAST_ROWS, self._most)), self._most)

    def _time(self, calm: float) -> float:
        """Seconds per step for background rows; `calm` is the time of a step without the rows.

        The time of a calm step beyond the usual time counts as rebuilding.
        """
        usual = min(statistics.median(self._usual), calm) if self._usual else calm
        rest = self._allowed * usual - (calm - usual)
        return max(rest, LEAST_PART * self._allowed * calm)

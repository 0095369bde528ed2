"""What slots have logged, told to the script once for each committed step, whoever dies."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ecrm.engine.engine import Engine

Logged = Mapping[int, Mapping[str, float]]
"""What slots have logged in a step: {slot: {name: value}}, slots ascending."""

ENDS_LATER = 64
"""So many steps after a committed one training ends where a listener of commits asks for that.

All ranks know of the commit by then, whatever has failed meanwhile, and whatever the interval.
"""


class Mark(Protocol):
    """Where the main rank writes down how far it has told the script; outlives that rank."""

    def read(self) -> tuple[int, int]:
        """The step before which all was told, and that before which training ends, -1 for none."""

    def write(self, step: int, ends_at: int) -> None:
        """All before a step was told, and a listener has had training end before `ends_at`."""


class NoMark:
    """Of a rank that dies with all that was told."""

    def read(self) -> tuple[int, int]:
        return 0, -1

    def write(self, step: int, ends_at: int) -> None:
        """There is nobody to read it."""


class FileMark:
    """A mark in a file, which every rank sees. What the system refuses is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def read(self) -> tuple[int, int]:
        with contextlib.suppress(OSError, ValueError):
            told, ends_at = map(int, self._path.read_text().split())
            return told, ends_at
        return 0, -1

    def write(self, step: int, ends_at: int) -> None:
        with contextlib.suppress(OSError):
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(self._descriptor, b"%020d %020d\n" % (step, ends_at), 0)  # of one size


class LogDelivery:
    """Tells what slots have logged, once for each committed step, and in order.

    `logged(step, values)` hears of a step as soon as it is committed. `tell(step, values)` is the
    script's own code. The main rank tells it at once, and marks that. Others tell it at the next
    commit: the main rank has done so before. Where the main rank dies before, the next one tells
    the step as the main rank.
    """

    def __init__(
        self,
        engine: Engine,
        logged: Callable[[int, Logged], None],
        tell: Callable[[int, Logged], None],
        mark: Mark,
    ) -> None:
        self._engine, self._logged, self._tell, self._mark = engine, logged, tell, mark
        self._heard = self._seen = self._before = engine.committed
        self._untold: dict[int, Logged] = {}
        self._was_main = self._is_main
        self._told_before = engine.committed
        if self._was_main:
            mark.write(engine.committed, -1)
        self._telling = -1
        self.as_main: bool | None = None
        """Whether the step that is being told is the main rank's to tell; None outside of that."""
        self.ends_at = -1
        """The step before which a listener wants training to end; -1 for none."""

    @property
    def _is_main(self) -> bool:
        return self._engine.rank == self._engine.view.reporter

    @property
    def under_way(self) -> bool:
        """Whether a listener is being told."""
        return self._telling >= 0

    def stop(self) -> None:
        """The listener that is being told wants training to end."""
        later = max(ENDS_LATER, 2 * self._engine.state.policy.commit_interval)
        if self.ends_at < 0:
            self.ends_at = self._telling + 1 + later

    def deliver(self, all_of_it: bool = False) -> None:
        """Tell of the steps that are committed now, and let the engine forget their notes.

        `all_of_it`: the main rank is known to have told all.
        """
        self._hear()
        committed = self._engine.committed
        if self._is_main and not self._was_main:
            self._was_main = True
            self._told_before, ends_at = self._mark.read()
            self.ends_at = ends_at if self.ends_at < 0 else self.ends_at
        until = committed if self._is_main or all_of_it else self._before
        if committed > self._seen:
            until = max(until, self._seen)
            self._before, self._seen = self._seen, committed
        for step in [step for step in sorted(self._untold) if step < until]:
            self._tell_one(step, self._untold.pop(step))

    def _hear(self) -> None:
        engine = self._engine
        for step in range(self._heard, engine.committed):
            notes = engine.state.log.of(step)
            if notes:
                self._untold[step] = {slot: _read(note) for slot, note in notes.items()}
                self._logged(step, self._untold[step])
        if self._heard < engine.committed:
            self._heard = engine.committed
            engine.state.log.forget(self._heard)

    def _tell_one(self, step: int, logged: Logged) -> None:
        self._telling, self.as_main = step, self._is_main and step >= self._told_before
        try:
            self._tell(step, logged)
        finally:
            self._telling, self.as_main = -1, None
        if self._is_main:
            self._mark.write(step + 1, self.ends_at)


def _read(note: Tensor) -> dict[str, float]:
    logged: dict[str, float] = json.loads(bytes(note.tolist()))
    return logged

"""Logged values of slots, told to the script once for every committed step, despite deaths."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ecrm.engine.engine import Engine

MARK = "told-"
"""Begin of the names of files with a mark; the rank follows."""

Logged = Mapping[int, Mapping[str, float]]
"""Values logged by slots in a step: {slot: {name: value}}, slots ascending."""

ENDS_LATER = 64
"""Least number of steps from a committed step to the end of training asked for by its listener.

By then all ranks know of the commit, despite failures. With long commit intervals twice the
interval counts.
"""


class DeliveryMark(Protocol):
    """A record of the steps told to the script by the main rank; the mark outlives the rank."""

    def begin(self, step: int) -> None:
        """Record `step` on the main rank of the start; marks of earlier runs count no more."""

    def read(self) -> tuple[int, int]:
        """Return (step, ends_at): all before `step` was told, training ends before `ends_at`.

        `ends_at` is -1 if no listener wants an end.
        """

    def write(self, step: int, ends_at: int) -> None:
        """Record `step` and `ends_at`, with the meaning as in `read`."""


class NoMark:
    """No mark: for a rank alone, and for a run without a folder."""

    def begin(self, step: int) -> None:
        """Do nothing: no rank reads a mark."""

    def read(self) -> tuple[int, int]:
        return 0, -1

    def write(self, step: int, ends_at: int) -> None:
        """Do nothing: no rank reads a mark."""


class FileMark:
    """A mark in files of a folder that every rank sees. Errors of the system are ignored.

    Every rank writes a file of its own, and the latest step counts. So a rank that was given up
    cannot take the mark back, however late the rank writes.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._own = folder, folder / f"{MARK}{rank}"
        self._descriptor = -1

    def begin(self, step: int) -> None:
        for path in self._folder.glob(f"{MARK}*"):
            if path != self._own:
                with contextlib.suppress(OSError):
                    path.unlink()
        self.write(step, -1)

    def read(self) -> tuple[int, int]:
        found = [(0, -1)]
        for path in self._folder.glob(f"{MARK}*"):
            with contextlib.suppress(OSError, ValueError):
                told, ends_at = map(int, path.read_text().split())
                found.append((told, ends_at))
        return max(found)

    def write(self, step: int, ends_at: int) -> None:
        with contextlib.suppress(OSError):
            if self._descriptor < 0:
                self._descriptor = os.open(self._own, os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(self._descriptor, b"%020d %020d\n" % (step, ends_at), 0)  # of fixed size


class LogDelivery:
    """Tells logged values of slots, once for every committed step, in order.

    `tell(step, values)` is the script's own code. The main rank calls `tell` at once, and marks the
    step as told. All remaining ranks call `tell` at the next commit, after the main rank. If the
    main rank dies before, the next main rank tells the step as the main rank.
    """

    def __init__(
        self,
        engine: Engine,
        tell: Callable[[int, Logged], None],
        mark: DeliveryMark,
    ) -> None:
        self._engine, self._tell, self._mark = engine, tell, mark
        self._heard = self._seen = self._before = engine.committed
        self._untold: dict[int, Logged] = {}
        self._was_main = self._is_main
        self._told_before = engine.committed
        if self._was_main:
            mark.begin(engine.committed)
        self._telling = -1
        self.as_main: bool | None = None
        """Whether the running `tell` is the main rank's, for a step not marked as told.

        `None` while no `tell` is running.
        """
        self.ends_at = -1
        """The step before which a listener wants training to end; -1 if no listener does."""

    @property
    def _is_main(self) -> bool:
        return self._engine.rank == self._engine.view.reporter

    @property
    def under_way(self) -> bool:
        """Whether `tell` runs now."""
        return self._telling >= 0

    def stop(self) -> None:
        """Note: the running listener wants training to end."""
        later = max(ENDS_LATER, 2 * self._engine.state.policy.commit_interval)
        if self.ends_at < 0:
            self.ends_at = self._telling + 1 + later

    def deliver(self, all_of_it: bool = False) -> None:
        """Tell newly committed steps.

        `all_of_it`: the main rank is known to have told all steps.
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
                self._untold[step] = {slot: read_note(note) for slot, note in notes.items()}
        self._heard = max(self._heard, engine.committed)

    def _tell_one(self, step: int, logged: Logged) -> None:
        self._telling, self.as_main = step, self._is_main and step >= self._told_before
        try:
            self._tell(step, logged)
        finally:
            self._telling, self.as_main = -1, None
        if self._is_main:
            self._mark.write(step + 1, self.ends_at)


def read_note(note: Tensor) -> dict[str, float]:
    """The values logged by a slot in a step, from the slot's note."""
    logged: dict[str, float] = json.loads(bytes(note.tolist()))
    return logged

"""Report when a run stands still, and name the ranks with a script's code at work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from ecrm.base.console import say
from ecrm.base.wording import named
from ecrm.engine.engine import Engine
from ecrm.engine.hooks import Hooks
from ecrm.run.slot_faults import Place

QUIET_SECONDS = 10.0
"""Seconds without a new phase before a run is reported to stand still."""


class Standstill:
    """Checks once a second, on a thread, whether a new phase has begun on this rank.

    The watcher goes between an engine and the engine's `hooks`, to see the phases. The reporter
    prints one line for each standstill. `places` returns the places of the script's own code, by
    rank, of ranks on this host; an empty mapping without such code.
    """

    def __init__(self, hooks: Hooks, seconds: float = QUIET_SECONDS) -> None:
        self._seconds, self._hooks = seconds, hooks
        self._begun, self._where, self._told = 0, (0, ""), False
        self.places: Callable[[], Mapping[int, Place]] = dict
        self._phase, hooks.phase = hooks.phase, self._begins
        self._ended = threading.Event()

    def _begins(self, step: int, name: str) -> None:
        """Count a phase beginning on this rank."""
        self._begun += 1
        self._where = step, name
        self._phase(step, name)

    def watch(self, engine: Engine) -> None:
        """Check from now on, until `end`."""
        self._engine = engine
        threading.Thread(target=self._watch, name="standstill", daemon=True).start()

    def end(self) -> None:
        """Stop checking: the run is over, and no more phases are expected."""
        self._ended.set()

    def _watch(self) -> None:
        seen, quiet, tick = self._now(), 0.0, min(1.0, self._seconds / 4)
        while not self._ended.wait(tick):
            now = self._now()
            quiet = 0.0 if now != seen else quiet + tick
            self._told = self._told and now == seen
            seen = now
            if self._begun and quiet >= self._seconds and not self._told:
                self._told = True
                if self._engine.rank == self._engine.view.reporter:
                    say(self.in_words())

    def _now(self) -> object:
        return self._begun, self._engine.state.commits, self.places()

    def in_words(self) -> str:
        """The line about a standstill, as seen from this rank."""
        step, phase = self._where
        at = dict(sorted(self.places().items()))
        if not at:
            return f"! nothing has gone on for {self._seconds:g} s, in step {step} ({phase})"
        work = "; ".join(f"{named('rank', [rank])} is at {place}" for rank, place in at.items())
        return (
            f"! nothing has gone on for {self._seconds:g} s, in step {step} ({phase}): the "
            f"script's own code is waited for: {work}"
        )

"""Reports of a run for people: lines on the terminal and events in the run folder.

Every rank has the events; the view's reporter writes an event before taking part in the next
commit. If the reporter cannot write, all ranks learn so within a few commits. The other ranks keep
the events of the last commits, and a new reporter writes the events missing from the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ecrm.base.console import say
from ecrm.config.faults import Kill
from ecrm.engine import events
from ecrm.engine.engine import Engine
from ecrm.engine.events import Event, Identity
from ecrm.placement.view import View
from ecrm.run.metrics_endpoint import MetricsEndpoint
from ecrm.run.run_folder import RunFolder

TOLD_AGAIN = frozenset(
    kind.name for kind in (events.Progress, events.Evaluation, events.EndedEarly)
)
"""Events told again whenever the step is done again."""

ONCE_A_STEP = TOLD_AGAIN | {events.NotFinite.name}
"""Events told once a step, however often the step is done."""

Make = Callable[[], tuple[Event, str]]
"""Returns an event and the event's printed words, "" for none."""

KEPT_COMMITS = 3
"""Asking to stop for want of a disk takes one commit, a reshape may add one."""


def _identities(lines: list[dict[str, Any]]) -> set[Identity]:
    """The identities of all events of a file, given in the order of the file."""
    found, rolled_back, joined = set(), -1, -1
    for fields in lines:
        found.add(events.EVENTS[fields["event"]].identity(fields, rolled_back, joined))
        if fields["event"] == events.RolledBack.name:
            rolled_back = fields["epoch"]
        if fields["event"] == events.Joined.name:
            joined = fields["epoch"]
    return found


class Reporter:
    """Passes an engine's events on; only the view's reporter writes and prints."""

    def __init__(
        self,
        folder: RunFolder,
        processes: Mapping[int, Mapping[str, Any]],
        terms: events.Terms,
        metrics: MetricsEndpoint | None = None,
    ) -> None:
        self._folder, self._processes, self._terms = folder, processes, terms
        self._metrics = MetricsEndpoint() if metrics is None else metrics
        self._engine: Engine | None = None
        self._kept: list[tuple[int, Identity, Make]] = []
        self._last_rollback = self._last_join = -1
        self._told: set[Identity] | None = (
            None  # ONCE_A_STEP; None if other ranks may have told more
        )

    def watch(self, engine: Engine) -> None:
        """Report on this engine from now on."""
        self._engine = engine

    @property
    def view(self) -> View:
        """The roles of all ranks."""
        return self._watched.view

    @property
    def _watched(self) -> Engine:
        assert self._engine is not None, "watch() comes before events"
        return self._engine

    @property
    def _speaks(self) -> bool:
        return self._engine is not None and self._engine.rank == self._engine.view.reporter

    @property
    def cannot_write(self) -> bool:
        """Whether this rank is the reporter and has failed to write the run folder."""
        return self._speaks and self._folder.trouble is not None

    def started(self, start: events.Start, in_words: str) -> None:
        """Write ranks.json, a line and the first event: the run begins."""
        self._folder.begin_epoch(self.view.epoch, self._speaks)
        if self._speaks:
            self._folder.ranks(self.view, self._processes)
        self._tell(start, in_words)

    def killing(self, kill: Kill, step: int) -> None:
        """Report this rank's own scheduled death, just before; no other rank can."""
        self._folder.event(
            events.Kill(rank=kill.rank, step=step, phase=kill.phase, scheduled=str(kill))
        )

    def event(self, told: Event) -> None:
        """Report one event of the engine."""
        if isinstance(told, events.View):
            self._folder.begin_epoch(self.view.epoch, self._speaks)
            if self._speaks:
                self._folder.ranks(self.view, self._processes)
        self._tell(told, told.line(self._terms))

    def progress(self, step: int, make: Make) -> bool:
        """Report the progress told every so many steps; only the reporting rank calls `make`.

        Returns False if the progress of the step was written before the step was undone.
        """
        identity = events.Progress.identity({"step": step}, self._last_rollback)
        return self._write_or_keep(identity, make)

    def _tell(self, told: Event, in_words: str) -> None:
        identity = told.identity(told.fields(), self._last_rollback, self._last_join)
        if isinstance(told, events.RolledBack):
            self._last_rollback = told.epoch
        if isinstance(told, events.Joined):
            self._last_join = told.epoch
        self._write_or_keep(identity, lambda: (told, in_words))

    def _write_or_keep(self, identity: Identity, make: Make) -> bool:
        """Write an event, after events the reporter before may have left out; or keep the event.

        Events told again with a step are not kept once the step is undone. Returns False if the
        event was written before.
        """
        commits = self._watched.state.commits
        self._kept = [
            (at, kept, made)
            for at, kept, made in self._kept
            if at >= commits - KEPT_COMMITS and not self._comes_again(kept)
        ]
        self._kept.append((commits, identity, make))
        if not self._speaks:
            self._told = None
            self._metrics.end()
            return True
        before = self._told
        if before is None:
            written = self._folder.events()
            self._metrics.begin(written)
            before = _identities(written)
        self._told = {one for one in before if one[0] in ONCE_A_STEP and self._may_come(one)}
        is_new = not (identity in before or identity in self._told)
        for _, kept, made in self._kept:
            if kept in before or kept in self._told:
                continue
            if kept[0] in ONCE_A_STEP:
                self._told.add(kept)
            told, text = made()
            self._folder.event(told)
            self._metrics.tell(told, time.time())
            if text:
                say(text, getattr(told, "step", None))
        self._kept = []
        return is_new

    def _comes_again(self, told: Identity) -> bool:
        return told[0] in TOLD_AGAIN and bool(told[1] > self._watched.step)

    def _may_come(self, told: Identity) -> bool:
        """Whether the step of an event may yet be undone."""
        return bool(told[1] >= self._watched.committed)

"""Following a run from outside while it goes on: its events, for whoever shows or keeps them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ecrm.launch.run_status import Standing
from ecrm.launch.scalars import Scalars
from ecrm.run.reading import Event, EventTail

if TYPE_CHECKING:
    from ecrm.launch.screen import Screen


class Follower(Protocol):
    """Takes the events of a run as they come."""

    def take(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


class Watch:
    """What is done beside mpirun: `look()` now and then from `began` to `ended`.

    `streams` are arguments of Popen for mpirun. Events that are there before the run are passed on
    to no follower.
    """

    def __init__(
        self, run_dir: Path, followers: Sequence[Follower] = (), screen: Screen | None = None
    ) -> None:
        self._tail = EventTail(run_dir / "events.jsonl")
        self._followers, self._screen = followers, screen
        self.streams: dict[str, Any] = {} if screen is None else screen.streams

    def began(self, process: subprocess.Popen) -> None:
        self._tail.new_events()
        if self._screen is not None:
            self._screen.began(process.stdout)

    def look(self, stopping: bool = False) -> None:
        if self._followers:
            events = self._tail.new_events()
            for follower in self._followers:
                follower.take(events)
        if self._screen is not None:
            self._screen.draw(stopping)

    def ended(self) -> None:
        self.look()
        for follower in self._followers:
            follower.close()
        if self._screen is not None:
            self._screen.ended()


def watch_of(run_dir: Path, steps: int, ranks: int, tensorboard: bool = False) -> Watch:
    """The watch of a run of so many steps and ranks, with a screen where there is a terminal."""
    followers: list[Follower] = [Scalars(run_dir)] if tensorboard else []
    if not sys.stdout.isatty():
        return Watch(run_dir, followers)
    from ecrm.launch.screen import screen_of

    standing = Standing(steps)
    screen = screen_of(sys.stdout, standing, ranks)
    return Watch(run_dir, followers if screen is None else [*followers, standing], screen)

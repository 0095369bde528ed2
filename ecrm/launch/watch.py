"""Follow a run from outside: pass its events on, to be shown or kept."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ecrm.config.schema import HooksConfig
from ecrm.launch.failure_hook import FailureHook
from ecrm.launch.logger_hook import LoggerHook
from ecrm.launch.scalars import Scalars
from ecrm.run.reading import Event, EventTail, read_own
from ecrm.run.run_status import RunStatus
from ecrm.run.session_folders import last_summary, session_folder, session_folders

if TYPE_CHECKING:
    from ecrm.launch.screen import Screen


LAST_LINES_SECONDS = 2.0
"""Seconds to wait for the last lines of a run: a process impossible to kill may hold the pipe."""

LATE_NEWS = re.compile(r"\[[^\]]+\] pmix_ptl_base: send_msg: write failed: .*\[sd = \d+\]\s*")
"""A line of mpirun: a message to a rank could not be sent, because the rank has left.

Ranks leave without MPI_Finalize (`ecrm/transport/mpi.py`). mpirun tells the remaining ranks of each
leaving rank, and may find some ranks gone.
"""


class Follower(Protocol):
    """Takes the events of a run as the run goes on."""

    def take(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


class Watch:
    """Work beside mpirun: `look()` now and then from `began` to `ended`.

    `streams` are arguments of Popen for mpirun. Events from before the run are passed on to no
    follower. Lines of mpirun on stderr are passed on, except LATE_NEWS of a complete run.
    """

    def __init__(
        self,
        run_dir: Path,
        followers_of: Callable[[Path], Sequence[Follower]] = lambda _: (),
        screen: Screen | None = None,
    ) -> None:
        self._followers_of, self._screen, self._run_dir = followers_of, screen, run_dir
        self._tails: list[EventTail] = []
        self._session, self._followers = 0, followers_of(run_dir)
        self._errors: threading.Thread | None = None
        self.streams: dict[str, Any] = {
            "stderr": subprocess.PIPE,
            "text": True,
            "errors": "replace",
        }
        if screen is not None:
            self.streams |= screen.streams

    def began(self, process: subprocess.Popen[str], launch: str | None = None) -> None:
        """Begin to watch an mpirun just started; `launch` is the name of its launch."""
        for tail in self._tails_now():
            tail.skip()

        def means_nothing(line: str) -> bool:
            return LATE_NEWS.fullmatch(line) is not None and self._is_complete(launch)

        if self._screen is not None and process.stdout is not None:
            self._screen.began(process.stdout, means_nothing)
        if process.stderr is not None:
            of = (process.stderr, means_nothing)
            self._errors = threading.Thread(target=_pass_on, args=of, name="errors", daemon=True)
            self._errors.start()

    def _is_complete(self, launch: str | None) -> bool:
        folders = session_folders(self._run_dir)
        summary = last_summary([read_own(each / "summary.json", launch) for each in folders])
        return summary.get("completed") is True and not summary.get("checkpoint_failed")

    def _tails_now(self) -> list[EventTail]:
        """The tails of the events of all sessions."""
        for folder in session_folders(self._run_dir)[len(self._tails) :]:
            self._tails.append(EventTail(folder / "events.jsonl"))
        return self._tails

    def show(self, lines: Iterable[str]) -> None:
        """Print lines of ranks that have joined; returns at their end."""
        if self._screen is not None:
            self._screen.show(lines, lambda _: False)
            return
        for line in lines:
            with contextlib.suppress(OSError):  # the terminal is gone
                sys.stdout.write(line)
                sys.stdout.flush()

    def look(self, stopping: bool = False) -> None:
        if self._followers:
            for number, tail in enumerate(self._tails_now()):
                if number >= self._session and (events := list(tail.new_events())):
                    self._pass_on(number, events)
        if self._screen is not None:
            self._screen.draw(stopping)

    def _pass_on(self, session: int, events: Sequence[Event]) -> None:
        """Pass on events of a session; the sessions before are over once the session has events."""
        if session > self._session:
            for follower in self._followers:
                follower.close()
            self._session = session
            self._followers = self._followers_of(session_folder(self._run_dir, session + 1))
        for follower in self._followers:
            follower.take(events)

    def ended(self) -> None:
        self.look()
        for follower in self._followers:
            follower.close()
        if self._errors is not None:
            self._errors.join(LAST_LINES_SECONDS)
        if self._screen is not None:
            self._screen.ended(LAST_LINES_SECONDS)


def _pass_on(lines: Iterable[str], means_nothing: Callable[[str], bool]) -> None:
    """Print mpirun's lines on stderr."""
    for line in lines:
        if not means_nothing(line):
            with contextlib.suppress(OSError):  # the terminal is gone
                sys.stderr.write(line)
                sys.stderr.flush()


def watch_of(
    run_dir: Path,
    steps: int,
    ranks: int,
    tensorboard: bool = False,
    hooks: HooksConfig | None = None,
    plain: bool = False,
) -> Watch:
    """The watch of a run of `steps` steps on `ranks` ranks, with a screen on a terminal.

    `plain`: lines alone, also on a terminal. The steps of a script are not known yet, 0: the event
    `start` tells the steps.
    """

    def followers_of(folder: Path) -> list[Follower]:
        found: list[Follower] = [Scalars(folder)] if tensorboard else []
        if hooks is not None and hooks.on_failure:
            found.append(FailureHook(hooks.on_failure, hooks.seconds, folder))
        if hooks is not None and hooks.logger:
            found.append(LoggerHook(hooks.logger, hooks.seconds, folder))
        return found

    if plain or not sys.stdout.isatty():
        return Watch(run_dir, followers_of)
    if importlib.util.find_spec("rich") is None:
        print("# no screen without the package rich: type pip install 'ecrm[rich]'")
        return Watch(run_dir, followers_of)
    from ecrm.launch.screen import screen_of

    standing = RunStatus(steps)
    screen = screen_of(sys.stdout, standing, ranks, run_dir)
    if screen is None:
        return Watch(run_dir, followers_of)

    def shown(folder: Path) -> list[Follower]:
        screen.folder = folder
        return [*followers_of(folder), standing]

    return Watch(run_dir, shown, screen)

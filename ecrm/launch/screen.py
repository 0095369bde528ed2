"""The terminal display of a run: the lines of its ranks, and below the lines a screen, redrawn.

The screen has a bar, the pace, logged values, the last events, and a table of the ranks. The ranks
write into a pipe of the launcher, since mpirun's own pipes hide the terminal from the ranks. The
bar is made from events.jsonl, and the table from the facts of `ecrm status`. Without a terminal no
display is made, and the lines of the ranks go to the launcher's own output.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ecrm.base.wording import counted, duration, measured, survives_in_words
from ecrm.engine.events import EVENT_LINE, PROGRESS_LINE
from ecrm.launch.run_state import RankState, rank_states, rank_table
from ecrm.run.run_status import RunStatus

REDRAW_SECONDS = 0.5
RANKS_SECONDS = 2.0
"""Seconds between two looks at the ranks: a look reads some files of every rank."""
LAST_EVENTS = 3
NARROW = 64
BESIDE_TABLE = 12
"""Lines of a terminal that the table of ranks leaves free."""


class Screen:
    """Shows a run of `ranks` ranks on a terminal, from `began` to `ended`.

    `folder` is the folder of the run's present session.
    """

    def __init__(self, console: Console, standing: RunStatus, ranks: int, folder: Path) -> None:
        self._console, self._standing, self._ranks = console, standing, ranks
        self.folder = folder
        self._found: Sequence[RankState] = ()
        self._looked = -RANKS_SECONDS
        self._events: deque[tuple[float, str]] = deque(maxlen=LAST_EVENTS)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._began = self._drawn = time.monotonic()
        self._reader: threading.Thread | None = None

    @property
    def streams(self) -> dict[str, Any]:
        """Output streams of mpirun, as arguments of Popen."""
        merged = {"stderr": subprocess.STDOUT} if sys.stderr.isatty() else {}
        return {"stdout": subprocess.PIPE, "text": True, "errors": "replace", **merged}

    def began(self, lines: Iterable[str], means_nothing: Callable[[str], bool]) -> None:
        """Show `lines` of the run just started, except lines for which `means_nothing` is true."""
        self._began = time.monotonic()
        self._live.start()
        self._reader = threading.Thread(
            target=self.show, args=(lines, means_nothing), name="lines", daemon=True
        )
        self._reader.start()

    def draw(self, stopping: bool) -> None:
        """Draw the bar anew, if due; `stopping`: the run was asked to stop."""
        now = time.monotonic()
        if now - self._drawn < REDRAW_SECONDS:
            return
        self._drawn = now
        with contextlib.suppress(OSError):  # the terminal is gone
            # The present size, not COLUMNS: a shell may have exported COLUMNS before the window
            # was resized.
            size = os.get_terminal_size(self._console.file.fileno())
            self._console.size = ConsoleDimensions(size.columns or 80, size.lines or 24)
            if now - self._looked >= RANKS_SECONDS:
                self._looked = now
                self._found = rank_states(
                    self.folder / "ranks.json", self._standing.rebuilding, "training"
                )
            picture = self._picture(time.time(), now, stopping)
            self._live.update(picture, refresh=True)

    def ended(self, seconds: float) -> None:
        """Show the last lines, waiting at most `seconds`, and remove the bar."""
        if self._reader is not None:
            self._reader.join(seconds)
        with contextlib.suppress(OSError):
            self._live.stop()

    def show(self, lines: Iterable[str], means_nothing: Callable[[str], bool]) -> None:
        """Show lines of ranks above the bar, except lines of progress."""
        for line in lines:
            if not PROGRESS_LINE.match(line) and not means_nothing(line):
                if EVENT_LINE.match(line):
                    self._events.append((time.monotonic(), line.rstrip("\n")))
                with contextlib.suppress(OSError):
                    self._console.out(line.rstrip("\n"), highlight=False)

    def _picture(self, now: float, tick: float, stopping: bool) -> RenderableType:
        """The screen at `now`, in seconds since the epoch; `tick` is by time.monotonic()."""
        standing, width = self._standing, self._console.width
        if not standing.started:
            return _line(f"starting {self._ranks} ranks  {duration(tick - self._began)}")
        first = Table.grid(padding=(0, 1), expand=True)
        first.add_column(no_wrap=True)
        first.add_column(ratio=1)
        first.add_column(no_wrap=True)
        steps = f"{standing.steps:,}"
        step = f"step {standing.step:>{len(steps)},}"
        if standing.open_end:
            first.add_row(f"{step} of at most {steps}", "", "")
        else:
            bar = ProgressBar(
                standing.steps, standing.step, complete_style="cyan", finished_style="green"
            )
            left = standing.seconds_left(now)
            after = f"{standing.step / standing.steps:.0%}"
            if not standing.finishing:
                after += "  " + ("-" if left is None else duration(left)) + " left"
            first.add_row(f"{step}/{steps}", bar, after)
        lines: list[RenderableType] = [first, _line(_numbers(standing, wide=width >= NARROW))]
        if standing.rebuilding:
            lines.append(_line(_rebuilding(standing), "yellow"))
        if stopping:
            lines.append(_line("stopping after this step; Ctrl-C again ends it at once", "yellow"))
        elif standing.finishing:
            lines.append(_line("all steps done: evaluation and checks"))
        lines += [_line(f"{duration(tick - at)} ago  {text}") for at, text in tuple(self._events)]
        most = self._console.height - BESIDE_TABLE
        table = _table(self._found, most, narrow=width < NARROW)
        return Group(*lines, *(_line(text, style) for text, style in table))


def screen_of(stream: TextIO, standing: RunStatus, ranks: int, folder: Path) -> Screen | None:
    """A screen if `stream` is a terminal able to redraw, else `None`."""
    console = Console(file=stream)
    can_redraw = console.is_terminal and not console.is_dumb_terminal
    return Screen(console, standing, ranks, folder) if can_redraw else None


def _table(ranks: Sequence[RankState], most: int, narrow: bool) -> list[tuple[str, str]]:
    """(line, style) of a table of at most `most` ranks; ranks that are not alive come first."""
    if not ranks or most < 1:
        return []
    shown = ranks
    if len(ranks) > most:
        first = sorted(ranks, key=lambda each: each.state == "alive")[:most]
        shown = sorted(first, key=lambda each: each.rank)
    header, *rows = rank_table(shown, narrow)
    styles = ["" if each.state == "alive" else "yellow" for each in shown]
    lines = [(header, ""), *zip(rows, styles, strict=True)]
    if left := len(ranks) - len(shown):
        lines.append((f"and {counted(left, 'rank')} more: ecrm status", ""))
    return lines


def _numbers(standing: RunStatus, wide: bool) -> str:
    text = "".join(f"{name} {measured(value)}  " for name, value in standing.logged.items())
    if standing.samples_per_second is not None:
        text += f"{standing.samples_per_second:,.0f} {'samples/s' if wide else '/s'}"
    else:
        pace = standing.steps_per_second
        text += f"{'-' if pace is None else f'{pace:,.1f}'} steps/s"
    if wide and standing.failures:
        text += f"  survived {counted(standing.failures, 'failure')}"
    if wide and standing.failures_left is not None:
        text += f"  {survives_in_words(standing.failures_left)}"
    return text


def _rebuilding(standing: RunStatus) -> str:
    shards = sorted(standing.rebuilding)
    noun = "shards" if len(shards) > 1 else "shard"
    return f"rebuilding {noun} {', '.join(map(str, shards))}: {standing.rebuilt:.0%}"


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")

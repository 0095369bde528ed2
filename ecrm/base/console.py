"""Output of a command at work: lines, progress, and the reasons for waiting."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TextIO

from ecrm.base.log import tell
from ecrm.base.wording import duration

PATIENCE_SECONDS = 2.0
AGAIN = 5
"""A lasting wait is told again after this many times the seconds of the last line."""

TERMINAL_SECONDS = 0.2


def say(text: str, step: int | None = None, on_stderr: bool = False) -> None:
    """Print a line, as a record of the logger "ecrm": see `ecrm.base.log`.

    `step` is the step in the record, by default the step at work.
    """
    tell(text, step, on_stderr)


class Progress:
    """Shows a command's progress: a refreshed line on a terminal, or one every `plain_seconds`.

    `noun` names the counted things. As a context manager it removes the refreshed line from a
    terminal at the end of the body, also after an error. `clock` returns seconds; a test passes its
    own clock to avoid waiting.
    """

    def __init__(
        self,
        verb: str,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        noun: str = "rows",
        plain_seconds: float = 5.0,
    ) -> None:
        self._verb, self._stream, self._clock, self._noun = verb, stream, clock, noun
        self._terminal = stream.isatty()
        self._interval_seconds = TERMINAL_SECONDS if self._terminal else plain_seconds
        self._began = self._shown = clock()
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def update(self, done: int, more: str, fraction: float | None) -> None:
        """Show the state if the interval has passed.

        `done` is the count so far, `more` is further text, `fraction` the share of the work done,
        None if unknown.
        """
        now = self._clock()
        if now - self._shown < self._interval_seconds:
            return
        self._shown = now
        elapsed = now - self._began
        line = f"{self._verb}: "
        if fraction:  # first: the end of the line is cut off on a narrow terminal
            line += f"{fraction:.0%}  ETA {duration(elapsed * (1 - fraction) / fraction)}  "
        line += f"{done:,} {self._noun}  {more}  {done / elapsed:,.0f} {self._noun}/s"
        if self._terminal:
            line = line[: self._columns() - 1]
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        """Print a lasting line."""
        self.clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def clear(self) -> None:
        """Clear the refreshed line, if any."""
        if self._width:
            self._stream.write("\r" + " " * min(self._width, self._columns() - 1) + "\r")
            self._stream.flush()
            self._width = 0

    def _columns(self) -> int:
        """Present width of the terminal: a longer line would be broken in two."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            return 80


class Waiting:
    """Tells the reason for a long wait.

    Call the object at the begin of a wait, as in `waiting("reading the data")`; `say` gets the
    line, on a thread. The wait ends at the next call, with `over()`, or at the end of a `with`
    block.
    """

    def __init__(self, say: Callable[[str], None], after: float = PATIENCE_SECONDS) -> None:
        self._say, self._after = say, after
        self._over = threading.Event()

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        self.over()

    def __call__(self, what: str) -> None:
        self.over()
        self._over = threading.Event()
        threading.Thread(target=self._tell, args=(what, self._over), daemon=True).start()

    def over(self) -> None:
        """End the wait."""
        self._over.set()

    def _tell(self, what: str, over: threading.Event) -> None:
        waited, until = 0.0, self._after
        while not over.wait(until - waited):
            self._say(so_far(what, until))
            waited, until = until, until * AGAIN


def so_far(what: str, seconds: float) -> str:
    """The line about a wait at the start of a run."""
    return f"waiting until {what}: {seconds:.0f} s so far"

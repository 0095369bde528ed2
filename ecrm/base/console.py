"""What a command prints while it works: lines, how far it is, and what it waits for."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import TextIO

from ecrm.base.wording import duration

PATIENCE_SECONDS = 2.0
AGAIN = 5
"""A wait that lasts is told again after so many times the seconds of the last time."""

TERMINAL_SECONDS = 0.2


def say(text: str) -> None:
    """Print a line; a terminal that is gone costs the line, not the run."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


class Progress:
    """Says how far a command is: one refreshed line on a terminal, or one every `plain_seconds`.

    `noun` is what is counted. As a context manager it leaves a terminal without the refreshed line,
    however the body ends. `clock` returns seconds and is an argument so that tests need not wait.
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
        """Show the state if it is time to.

        `done` is how many were counted, `more` what else there is to say, `fraction` the share of
        the work done, where that is known.
        """
        now = self._clock()
        if now - self._shown < self._interval_seconds:
            return
        self._shown = now
        elapsed = now - self._began
        line = f"{self._verb}: "
        if fraction:  # first: what does not fit a terminal is left out
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
        """Print a line that stays."""
        self.clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def clear(self) -> None:
        """Clear the refreshed line, if there is one."""
        if self._width:
            self._stream.write("\r" + " " * min(self._width, self._columns() - 1) + "\r")
            self._stream.flush()
            self._width = 0

    def _columns(self) -> int:
        """Width of the terminal now: a longer line would be broken in two."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            return 80


class Waiting:
    """Says what is waited for, if that takes long.

    Call it as something begins, as in `waiting("reading the data")`; `say` gets the line, on a
    thread. The wait ends as the next begins, or with `over()`, as with the end of a `with` block.
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
        """Nothing is waited for."""
        self._over.set()

    def _tell(self, what: str, over: threading.Event) -> None:
        waited, until = 0.0, self._after
        while not over.wait(until - waited):
            self._say(so_far(what, until))
            waited, until = until, until * AGAIN


def so_far(what: str, seconds: float) -> str:
    """The line about a wait at the start of a run."""
    return f"waiting until {what}: {seconds:.0f} s so far"

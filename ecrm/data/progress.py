"""The progress line of commands that stream through data."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO


class Progress:
    """Says how far a command is: one refreshed line on a terminal, else a line every few seconds.

    As a context manager it leaves a terminal without the refreshed line, however the body ends.
    `clock` returns seconds and is an argument so that tests need not wait.
    """

    def __init__(self, verb: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._verb, self._stream, self._clock = verb, stream, clock
        self._terminal = stream.isatty()
        self._interval_seconds = 0.2 if self._terminal else 5.0
        self._began = self._shown = clock()
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self.clear()

    def update(self, rows: int, byte_count: int, fraction: float | None) -> None:
        """Show the state if it is time to: rows and bytes so far, and the share of the work done where that is known."""
        now = self._clock()
        if now - self._shown < self._interval_seconds:
            return
        self._shown = now
        elapsed = now - self._began
        line = f"{self._verb}: {rows:,} rows  {byte_count / 1e6:,.1f} MB  {rows / elapsed:,.0f} rows/s"
        if fraction:
            line += f"  {fraction:.0%}  ETA {_duration(elapsed * (1 - fraction) / fraction)}"
        if self._terminal:
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
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0


def _duration(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds, the leading ones left out where they are 0."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"

"""Reads files of a run folder: events.jsonl, whole or while growing, and JSON files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

LAUNCH = "ECRM_LAUNCH"
"""Environment variable with the launch of a rank.

Files of ranks in the run folder also name the launch.
"""

Event = dict[str, Any]

_BLOCK_BYTES = 1 << 16

OPENING = '{"time": '
"""The begin of every line.

Inside a line, the text marks the begin of a second line, after a rank died while writing.
"""


def parse_events(text: str) -> tuple[list[Event], int]:
    """(events in the order of their lines, number of damaged lines).

    A rank killed while writing leaves a line cut short, and the next event continues the line. The
    second event of such a pair is kept. Empty lines and a last line without newline are allowed.
    """
    return _parse_lines(text.split("\n"))


def _parse_lines(lines: Iterable[str]) -> tuple[list[Event], int]:
    events, damaged = [], 0
    for line in filter(None, lines):
        event = _event(line)
        if event is None:
            damaged += 1
            event = _event(line[max(line.rfind(OPENING), 0) :])
        if event is not None:
            events.append(event)
    return events, damaged


def _event(line: str) -> Event | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "event" in value and "time" in value else None


class EventTail:
    """Hands out every event of a growing file once, when the line is complete."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new_events(self) -> Iterator[Event]:
        """Events written since the last call, read line by line; none without a readable file.

        The file of a run of months has gigabytes.
        """
        with contextlib.suppress(OSError):  # read later: the run must not end for want of a reader
            with self._path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._offset += len(line)
                    yield from parse_events(line.decode(errors="replace"))[0]

    def skip(self) -> None:
        """Hand out only events that are written from now on."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            self._offset = end_of_lines(file)


def end_of_lines(file: BinaryIO) -> int:
    """The position after the last complete line, found from the end of the file."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - _BLOCK_BYTES)
        file.seek(begin)
        if found := file.read(end - begin).rfind(b"\n") + 1:
            return begin + found
        end = begin
    return 0


def launch_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """The launch of this process, `None` for a line of mpirun typed by hand."""
    return environ.get(LAUNCH)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing or has no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_own(path: Path, launch: str | None) -> dict[str, Any]:
    """`read_json` of a file written by ranks of `launch`; empty for files of a different launch."""
    content = read_json(path)
    return content if content.get("launch") == launch else {}

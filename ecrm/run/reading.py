"""Reads what a run leaves in its folder: events.jsonl, whole or as it grows, and JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

LAUNCH = "ECRM_LAUNCH"
"""Environment variable that tells ranks of which launch they are.

What they leave in the run folder says it too.
"""

Event = dict[str, Any]

OPENING = '{"time": '
"""How every line begins.

Inside a line it shows where another one begins, after a rank died while writing.
"""


def parse_events(text: str) -> tuple[list[Event], int]:
    """(events in the order of their lines, number of damaged lines).

    A rank killed while it writes leaves a line cut short, which the next line then continues; of
    such a pair the second is saved. Both empty lines and a last line without newline are allowed.
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
    """Hands out each event of a growing file once, when its line is complete."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new_events(self) -> list[Event]:
        """Events written since the last call; none while there is no file, or it cannot be read."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:  # read later: the run must not end for want of a reader
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return parse_events(complete.decode(errors="replace"))[0]


def launch_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """The launch that this process belongs to, None where the line of mpirun was typed by hand."""
    return environ.get(LAUNCH)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file, or no object in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_own(path: Path, launch: str | None) -> dict[str, Any]:
    """`read_json` of a file that ranks of this launch have written; empty if others have."""
    content = read_json(path)
    return content if content.get("launch") == launch else {}

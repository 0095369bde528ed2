"""The run folder: ranks.json, events.jsonl, summary.json, stopped.json, failure.json."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ecrm.base.epoch_drafts import EpochDrafts
from ecrm.engine.events import Event
from ecrm.placement.view import View
from ecrm.run.auto_resume import EVENTS, events_of
from ecrm.run.reading import launch_id
from ecrm.run.run_lock import make_run_dir

PROBE_BYTES, MOST_PROBED = 4096, 1 << 20
SUMMARY_DRAFT = ".summary.json"
STOPPED_DRAFT = ".stopped.json"


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON text of plain values; null for floats without a JSON form (NaN, infinities)."""
    return json.dumps(_sayable(value), indent=indent, allow_nan=False)


def _sayable(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _sayable(entry) for key, entry in value.items()}
    return [_sayable(entry) for entry in value] if isinstance(value, list | tuple) else value


class RunFolder:
    """Writes the files of a run; without a folder every call does nothing.

    Only one rank writes at a time. `trouble` describes the first failed write and the reason,
    `None` without a failed write. No write raises in the middle of a step: the writing rank looks
    at `trouble`. After a failed write no write is tried.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.trouble: str | None = None
        self.earlier = 0  # number of events of earlier starts
        self.unwritten_bytes = 0  # size of the first failed write
        self._drafts = EpochDrafts(Path() if path is None else path)
        if path is not None:
            make_run_dir(path)

    def begin_epoch(self, epoch: int, writes: bool) -> None:
        """Begin an epoch of the view: ranks of earlier epochs can replace no file any more.

        `writes`: this rank is the only writer of the epoch. failure.json and lines of events are
        not fenced.
        """
        self._drafts.epoch = epoch
        if writes and self.path is not None and self.trouble is None:
            try:
                self._drafts.begin(epoch)
            except OSError as error:
                self._in_trouble(self.path, error, 0)

    def event(self, told: Event) -> None:
        """Append a line to events.jsonl, in a single write: the whole line or nothing.

        The line also gets the time, in seconds since the epoch.
        """
        if self.path is None or self.trouble is not None:
            return
        file = self.path / EVENTS
        line = to_json({"time": time.time(), **told.to_dict()}).encode() + b"\n"
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                before = os.fstat(descriptor).st_size
                if os.write(descriptor, line) < len(line):
                    os.ftruncate(descriptor, before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)
        except OSError as error:
            self._in_trouble(file, error, len(line))

    def events(self) -> list[dict[str, Any]]:
        """The events of this start of the run in events.jsonl, without incomplete lines."""
        return list(islice(self.all_events(), self.earlier, None))

    def all_events(self) -> Iterator[dict[str, Any]]:
        """The events of all starts in events.jsonl."""
        return iter(()) if self.path is None else events_of(self.path)

    def probe(self, least: int = 0) -> None:
        """Set `trouble` if this rank cannot write `least` bytes into the folder.

        Tries with at least PROBE_BYTES and at most MOST_PROBED.
        """
        if self.path is None or self.trouble is not None:
            return
        file = self.path / f".probe.{os.getpid()}"
        try:
            try:
                file.write_bytes(bytes(min(max(least, PROBE_BYTES), MOST_PROBED)))
            finally:
                file.unlink(missing_ok=True)
        except OSError as error:
            self._in_trouble(self.path, error, least)

    def ranks(self, view: View, processes: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace ranks.json: every started rank with process, roles, and whether alive."""
        self._replace(
            "ranks.json",
            {
                "epoch": view.epoch,
                "launch": launch_id(),
                "ranks": [
                    {
                        "rank": rank,
                        **process,
                        "live": rank in view.live,
                        "shards": list(view.shards_of(rank)),
                        "slots": list(view.slots_of(rank)),
                        "dense": rank in view.dense,
                        "spare": rank in view.spares,
                    }
                    for rank, process in sorted(processes.items())
                ],
            },
        )

    def trace(self, events: dict[str, Any]) -> None:
        """Replace trace.json."""
        self._replace("trace.json", events)

    def draft_summary(self, fields: dict[str, Any], completed: bool) -> None:
        """Write the draft for `publish_summary`."""
        self._write(
            SUMMARY_DRAFT, "summary.json", {**fields, "launch": launch_id(), "completed": completed}
        )

    def publish_summary(self, completed: bool) -> None:
        """Turn the draft into summary.json, the marker of a complete run, or into rejected.json.

        Does nothing if a peer rank has done so.
        """
        self._publish(SUMMARY_DRAFT, "summary.json" if completed else "rejected.json")

    def draft_stopped(self, fields: dict[str, Any]) -> None:
        """Write the draft of stopped.json: the progress of a run asked to stop."""
        self._write(STOPPED_DRAFT, "stopped.json", {**fields, "launch": launch_id()})

    def publish_stopped(self) -> None:
        """Turn the draft into stopped.json, unless a peer rank has done so."""
        self._publish(STOPPED_DRAFT, "stopped.json")

    def _publish(self, draft: str, name: str) -> None:
        if self.path is not None:
            with contextlib.suppress(OSError):
                os.replace(self._drafts.path / draft, self.path / name)
                self._drafts.end()

    @property
    def is_complete(self) -> bool:
        """Whether summary.json exists, or the run has no folder."""
        return self.path is None or (self.path / "summary.json").exists()

    def failure(self, message: str, exit_code: int) -> None:
        """Replace failure.json: the reason for the end of the run."""
        self._drafts = EpochDrafts(Path() if self.path is None else self.path)
        self._replace(
            "failure.json", {"message": message, "exit_code": exit_code, "launch": launch_id()}
        )

    def _replace(self, name: str, content: dict[str, Any]) -> None:
        draft = f".{name}.{os.getpid()}"
        self._write(draft, name, content)
        if self.path is None or self.trouble is not None:
            return
        try:
            os.replace(self._drafts.path / draft, self.path / name)
        except OSError as error:
            self._in_trouble(self.path / name, error, 0)

    def _write(self, draft: str, name: str, content: dict[str, Any]) -> None:
        """Write the draft of the file called `name`."""
        if self.path is None or self.trouble is not None:
            return
        text = to_json(content, indent=1) + "\n"
        try:
            (self._drafts.path / draft).write_text(text)
        except OSError as error:
            with contextlib.suppress(OSError):
                (self._drafts.path / draft).unlink()
            self._in_trouble(self.path / name, error, len(text))

    def _in_trouble(self, what: Path, error: OSError, unwritten_bytes: int) -> None:
        if self.trouble is None:
            self.trouble, self.unwritten_bytes = (
                f"cannot write {what}: {error.strerror}",
                unwritten_bytes,
            )

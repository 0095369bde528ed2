"""TensorBoard scalars of a run, `train.tensorboard`, made from events.jsonl.

The launcher writes the scalars, and no rank: with any reporter, and after any death, one writer has
the steps of events.jsonl. Steps undone by a rollback are purged by a mark in the file.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ecrm.base.errors import UsageError
from ecrm.run.reading import Event, EventTail

FOLDER = "tensorboard"
FLUSH_SECONDS = 5
SCALARS = {
    "progress": {
        "steps_per_second": "train/steps_per_second",
        "samples_per_second": "train/samples_per_second",
        "rebuilt": "cluster/rebuilt",
        "failures_left": "cluster/failures_left",
    },
}
"""TensorBoard tags by event and field."""
OF_NAMES = {"progress": ("logged", "train"), "evaluation": ("values", "evaluation")}
"""By event, the field with values by name, and the first part of their tags."""


def require_tensorboard() -> None:
    """Raise UsageError unless the package tensorboard is installed; imports no tensorboard."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "train.tensorboard needs the package tensorboard, which is not installed",
            {"train.tensorboard": False},
            otherwise="type pip install 'ecrm[tensorboard]'",
        )


class Scalars:
    """Writes the folder tensorboard/ of a run, anew from all events of the run so far.

    Writing begins with the first event of this launch, since ranks want the run folder unchanged.
    An unwritable folder, or a broken package, costs the scalars and a line, not the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder, self._tail = run_dir / FOLDER, EventTail(run_dir / "events.jsonl")
        self._writer: Any = None
        self._failed = False

    def take(self, events: Sequence[Event]) -> None:
        if not events or self._failed:
            return
        try:
            if self._writer is None:
                self._open()
            for event in self._tail.new_events():
                for record in records(event):
                    self._writer.add_event(record)
        except (OSError, ImportError) as error:
            self._fail(error)

    def close(self) -> None:
        if self._writer is not None and not self._failed:
            try:
                self._writer.close()
            except OSError as error:
                self._fail(error)

    def _open(self) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        for old in self._folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = EventFileWriter(str(self._folder), flush_secs=FLUSH_SECONDS)

    def _fail(self, error: OSError | ImportError) -> None:
        self._failed = True
        why = getattr(error, "strerror", None) or error
        print(f"ecrm: warning: no scalars in {self._folder} from here on: {why}", file=sys.stderr)


def scalars_of(event: Event) -> dict[str, float]:
    """The values of an event by TensorBoard tag; empty for an event without scalars."""
    kind = event["event"]
    tagged = {tag: event.get(name) for name, tag in SCALARS.get(kind, {}).items()}
    field, group = OF_NAMES.get(kind, ("", ""))
    tagged |= {f"{group}/{name}": value for name, value in (event.get(field) or {}).items()}
    return {tag: value for tag, value in tagged.items() if value is not None}


def records(event: Event) -> Iterator[Any]:
    """The records of an event in TensorBoard's file: values, or the mark undoing later steps."""
    from tensorboard.compat.proto.event_pb2 import Event as Record
    from tensorboard.compat.proto.event_pb2 import SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary

    kind, at = event["event"], event["time"]
    if kind in ("start", "rolled_back"):
        kept = event["step"] if kind == "rolled_back" else event.get("resumed", {}).get("step", 0)
        mark = SessionLog(status=SessionLog.START)
        yield Record(wall_time=at, step=kept + 1, session_log=mark)
    values = [Summary.Value(tag=tag, simple_value=v) for tag, v in scalars_of(event).items()]
    if values:
        yield Record(wall_time=at, step=event["step"], summary=Summary(value=values))

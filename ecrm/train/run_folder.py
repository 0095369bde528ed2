"""The run folder: ranks.json, events.jsonl, summary.json, failure.json."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ecrm.placement.view import View


SUMMARY_DRAFT = ".summary.json"


class RunFolder:
    """Writes one run's files; without a folder every call does nothing. One rank at a time writes."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._warned = False
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)

    def event(self, fields: dict[str, Any]) -> None:
        """Append one line to events.jsonl, with the time in seconds since the epoch, in one write.

        A disk that is full or gone costs the events, not the run: said once.
        """
        if self.path is None:
            return
        line = json.dumps({"time": time.time(), **fields}) + "\n"
        try:
            descriptor = os.open(self.path / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            self._warn_once(error)

    def ranks(self, view: View, processes: dict[int, dict[str, Any]]) -> None:
        """Replace ranks.json: every rank the run was started with, its process, whether it lives, its roles."""
        self._replace(
            "ranks.json",
            {
                "epoch": view.epoch,
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

    def draft_summary(self, fields: dict[str, Any]) -> None:
        """Write what is to become summary.json, the marker that the run is complete."""
        self._replace(SUMMARY_DRAFT, {**fields, "completed": True})

    def publish_summary(self) -> None:
        """Turn the draft into summary.json, unless another rank has done so."""
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.path / SUMMARY_DRAFT, self.path / "summary.json")

    @property
    def is_complete(self) -> bool:
        """Whether summary.json is there, or nobody asked for a folder."""
        return self.path is None or (self.path / "summary.json").exists()

    def failure(self, message: str, exit_code: int) -> None:
        """Replace failure.json: why the run could not go on."""
        self._replace("failure.json", {"message": message, "exit_code": exit_code})

    def _replace(self, name: str, content: dict[str, Any]) -> None:
        if self.path is None:
            return
        temporary = self.path / f".{name}.{os.getpid()}"
        try:
            temporary.write_text(json.dumps(content, indent=1) + "\n")
            os.replace(temporary, self.path / name)
        except OSError as error:
            self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            print(f"ecrm: warning: cannot write in {self.path}: {error.strerror}; training goes on", file=sys.stderr, flush=True)

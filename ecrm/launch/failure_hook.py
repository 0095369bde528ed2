"""A command of the user for each failure survived: `hooks.on_failure`.

`ecrm launch` runs the command, on its own machine, and no rank does: a rank at work has no time for
a process, and a dying rank none at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ecrm.run.reading import Event

LOG = "hooks.log"
WAITING = 100
"""The most failures waiting for the command; later failures go without."""


class FailureHook:
    """Runs `command` in a shell for each event `failure`, one at a time, for at most `seconds`.

    The command finds the event as JSON in ECRM_EVENT, and the run folder in ECRM_RUN_DIR. Its
    output, and its exit code, are in hooks.log of the run folder. A failed command costs a line.
    """

    def __init__(self, command: str, seconds: float, run_dir: Path) -> None:
        self._command, self._seconds, self._folder = command, seconds, run_dir
        self._events: queue.Queue[Event | None] = queue.Queue(WAITING)
        self._worker: threading.Thread | None = None

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            if event["event"] == "failure":
                if self._worker is None:
                    self._worker = threading.Thread(target=self._work, name="hook", daemon=True)
                    self._worker.start()
                with contextlib.suppress(queue.Full):
                    self._events.put_nowait(event)

    def close(self) -> None:
        """Wait for commands at work or waiting, for the time of two commands at most."""
        if self._worker is not None:
            with contextlib.suppress(queue.Full):
                self._events.put_nowait(None)
            self._worker.join(2 * self._seconds + 1)

    def _work(self) -> None:
        while (event := self._events.get()) is not None:
            ended = self._run(event)
            if ended:
                print(f"ecrm: warning: hooks.on_failure {ended}", file=sys.stderr, flush=True)

    def _run(self, event: Event) -> str:
        """Run the command for an event; return the reason for a warning, or ""."""
        own = {"ECRM_EVENT": json.dumps(event), "ECRM_RUN_DIR": str(self._folder.absolute())}
        try:
            with open(self._folder / LOG, "ab") as log:
                when = time.strftime("%Y-%m-%d %H:%M:%S %z")
                log.write(f"{when} ranks {event.get('ranks')}: {self._command}\n".encode())
                log.flush()
                process = subprocess.Popen(
                    ["/bin/sh", "-c", self._command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **own},
                    start_new_session=True,
                )
                try:
                    code = process.wait(self._seconds)
                    ended = f"ended with {code}; see {self._folder / LOG}" if code else ""
                except subprocess.TimeoutExpired:
                    code, ended = -signal.SIGKILL, f"took more than {self._seconds:g} s: killed"
                with contextlib.suppress(ProcessLookupError):  # with all its children
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                log.write(f"exit code {code}\n".encode())
        except OSError as error:
            ended = f"cannot run: {error.strerror}"
        return ended

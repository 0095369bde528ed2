"""A command of the user beside a run, for W&B, MLflow and other loggers: `hooks.logger`.

`ecrm launch` starts the command, and no rank does: the one writer outlives every rank, and training
never waits for the writer.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ecrm.launch.failure_hook import LOG
from ecrm.launch.scalars import scalars_of
from ecrm.run.reading import Event, EventTail


class ValueLines:
    """The lines of a run's values, from the first event of the run folder on.

    A line is a JSON object `{"step": 50, "time": 1.7e9, "values": {"train/loss": 0.61}}`. Names are
    the tags of TensorBoard. Every value comes once for every step, steps ascending.
    """

    def __init__(self, run_dir: Path) -> None:
        self._tail, self._told = EventTail(run_dir / "events.jsonl"), dict[str, int]()

    def new(self) -> Iterator[str]:
        """The lines of all new events; a value told before for its step is left out."""
        for event in self._tail.new_events():
            step: int = event.get("step", -1)
            values = {
                tag: value
                for tag, value in scalars_of(event).items()
                if step > self._told.get(tag, -1)
            }
            self._told.update((tag, step) for tag in values)
            if values:
                yield json.dumps({"step": step, "time": event["time"], "values": values})


class LoggerHook:
    """Runs `command` in a shell, and writes the run's ValueLines to its standard input.

    A resumed run tells the earlier steps again. Input ends with the run. The command is killed
    `seconds` after that. Its output is in hooks.log.
    """

    def __init__(self, command: str, seconds: float, run_dir: Path) -> None:
        self._command, self._seconds, self._folder = command, seconds, run_dir
        self._lines = ValueLines(run_dir)
        self._news, self._over = threading.Event(), False
        self._process: subprocess.Popen[bytes] | None = None
        self._worker: threading.Thread | None = None

    def take(self, events: Sequence[Event]) -> None:
        if self._worker is None and events:
            self._worker = threading.Thread(target=self._work, name="logger", daemon=True)
            self._worker.start()
        self._news.set()

    def close(self) -> None:
        """End the command's input, and wait for the command."""
        if self._worker is None:
            return
        self._over = True
        self._news.set()
        self._worker.join(self._seconds)
        if self._worker.is_alive():
            self._warn(f"took more than {self._seconds:g} s after the last step: killed")
            self._kill()
            self._worker.join(1)

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # with all its children
                os.killpg(self._process.pid, signal.SIGKILL)

    def _work(self) -> None:
        try:
            with open(self._folder / LOG, "ab") as log:
                when = time.strftime("%Y-%m-%d %H:%M:%S %z")
                log.write(f"{when} logger: {self._command}\n".encode())
                log.flush()
                self._process = process = subprocess.Popen(
                    ["/bin/sh", "-c", self._command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "ECRM_RUN_DIR": str(self._folder.absolute())},
                    start_new_session=True,
                )
                left = self._feed(process)
                code = process.wait()
                self._kill()  # its children
                log.write(f"exit code {code}\n".encode())
        except OSError as error:
            self._warn(f"cannot run: {error.strerror}")
            return
        if code > 0 or (left and code == 0):
            early = " before the end of the run" if left else ""
            self._warn(f"ended with {code}{early}; see {self._folder / LOG}")

    def _feed(self, process: subprocess.Popen[bytes]) -> bool:
        """Write all lines until the run is over; returns whether the command ended before."""
        assert process.stdin is not None
        try:
            with process.stdin as lines:
                over = False
                while not over:
                    self._news.wait()
                    self._news.clear()
                    over = self._over
                    for line in self._lines.new():
                        lines.write(f"{line}\n".encode())
                    lines.flush()
        except BrokenPipeError:
            return True
        return False

    def _warn(self, what: str) -> None:
        run, command = (shlex.quote(words) for words in (str(self._folder), self._command))
        again = f"ecrm report {run} --session 1 --values | ECRM_RUN_DIR={run} sh -c {command}"
        print(
            f"ecrm: warning: hooks.logger {what}; all values once more, after the run: {again}",
            file=sys.stderr,
            flush=True,
        )

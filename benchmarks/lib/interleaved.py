"""Interleaved runs: the runs to compare share one machine and take turns of a second or two.

The pace of a shared machine changes by the minute. Interleaved runs all see the same changes.
Every run is started, warmed up and stopped by SIGSTOP to all its processes. Then one after the
other continues for a turn. Only steps that begin and end within a turn count.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ecrm.drill.drill_runs import read_run
from ecrm.process.linux import session_members
from ecrm.run.reading import parse_events
from lib import measure

START_SECONDS, END_SECONDS = 120.0, 60.0
ENDLESS = 1_000_000
"""Steps of a run that is asked to stop when it has been measured."""


class RunFailed(Exception):
    """A run ended by itself, or did not begin; the message says what it printed."""


@dataclass
class InterleavedRun:
    """One run. It is stopped except in its `turns`: (begin, end) in seconds since the epoch."""

    name: str
    folder: Path
    process: subprocess.Popen[str]
    turns: list[tuple[float, float]] = field(default_factory=list)

    @property
    def _members(self) -> list[int]:
        """What `ecrm launch` has started: mpirun in a session of its own, guards and ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with contextlib.suppress(OSError):
            return [
                pid
                for session in children.read_text().split()
                for pid in session_members(int(session))
            ]
        return []

    def signal(self, number: int) -> None:
        for pid in self._members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def check(self) -> None:
        """Raise RunFailed if it has ended."""
        if self.process.poll() is not None:
            raise RunFailed(
                f"{self.name} ended with {self.process.returncode}:\n{self.process.stdout.read()}"
            )

    def continue_for(self, seconds: float) -> None:
        begin = time.time()
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        self.signal(signal.SIGSTOP)
        self.turns.append((begin, time.time()))
        self.check()

    def end(self) -> None:
        """Ask it to stop, and see that it does; else nothing of it is left either."""
        self.signal(signal.SIGCONT)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.kill()
            self.process.communicate()


def step_seconds(
    finished: Sequence[tuple[int, float]], turns: Sequence[tuple[float, float]]
) -> list[float]:
    """Seconds of an average step of each turn, of the steps that begin and end in it.

    Raises ValueError for a turn without such a step.
    """
    found = []
    for begin, end in turns:
        inside = [(step, at) for step, at in finished if begin < at < end]
        if len(inside) < 2:
            raise ValueError(
                f"{len(inside)} steps were finished in a turn of {end - begin:.2f} s: "
                "give it longer turns"
            )
        found.append((inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0]))
    return found


@dataclass(frozen=True)
class Beside:
    """Seconds of an average step in each turn: `mine`, and `others` in the turns beside them."""

    mine: Sequence[float]
    others: Sequence[float]

    @property
    def overhead(self) -> float:
        """How much longer a step takes, as a share: the median over the turns."""
        return statistics.median(self._ratios) - 1

    @property
    def mean_overhead(self) -> float:
        """The same as a mean, for runs in which only some turns have a checkpoint in them."""
        return statistics.mean(self._ratios) - 1

    @property
    def _ratios(self) -> list[float]:
        return [one / other for one, other in zip(self.mine, self.others, strict=True)]


def run_interleaved(
    runs: Mapping[str, Mapping[str, Any]], folder: Path, warm_steps: int, turns: int, seconds: float
) -> dict[str, list[float]]:
    """Seconds of an average step in each turn, by the name of the run.

    `runs` are the config keys of each run. Each has `turns` of `seconds`, after at least
    `warm_steps` steps. All runs are gone afterwards. Raises RunFailed where one ends by itself.
    """
    started: list[InterleavedRun] = []
    try:
        for name, sets in runs.items():
            started.append(
                _start(
                    name,
                    folder / name,
                    {**sets, "train.steps": ENDLESS, "train.log_every_steps": 10},
                )
            )
            _warm_up(started[-1], warm_steps)
        for number in range(turns):
            for run in started if number % 2 == 0 else reversed(started):
                run.continue_for(seconds)
    finally:
        for run in started:
            run.end()
    try:
        return {run.name: step_seconds(read_run(run.folder).finished, run.turns) for run in started}
    finally:
        for run in started:
            shutil.rmtree(run.folder, ignore_errors=True)


def _start(name: str, folder: Path, sets: Mapping[str, Any]) -> InterleavedRun:
    words = [
        sys.executable,
        "-m",
        "ecrm",
        "launch",
        "quickstart",
        "--run-dir",
        str(folder),
        *measure.set_words(sets),
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return InterleavedRun(name, folder, process)


def _warm_up(run: InterleavedRun, steps: int) -> None:
    """Let it run until events.jsonl says that so many steps are done, then stop it."""
    deadline = time.monotonic() + START_SECONDS
    while not _has_done(run.folder / "events.jsonl", steps):
        run.check()
        if time.monotonic() > deadline:
            raise RunFailed(f"{run.name} did not come to step {steps} in {START_SECONDS:g} s")
        time.sleep(0.1)
    run.signal(signal.SIGSTOP)


def _has_done(events: Path, steps: int) -> bool:
    return any(step >= steps for step in _progress(events))


def _progress(events: Path) -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError):
        yield from (
            event["step"]
            for event in parse_events(events.read_text())[0]
            if event["event"] == "progress"
        )

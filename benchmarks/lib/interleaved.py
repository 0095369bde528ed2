"""Several runs that take turns on the machine, a second or two each, so that a pace that changes by the minute is the same for all.

Every run is started, warmed up and stopped (SIGSTOP to all its processes); then one after the other
is continued for a turn. Only steps that begin and end within a turn count.
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
class Player:
    """One run, stopped but for its turns: `turns` are (begin, end) in seconds since the epoch."""

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

    def play(self, seconds: float) -> None:
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
    """Seconds of an average step of each turn, of those that begin and end in it. Raises ValueError for a turn with none."""
    found = []
    for begin, end in turns:
        inside = [(step, at) for step, at in finished if begin < at < end]
        if len(inside) < 2:
            raise ValueError(
                f"{len(inside)} steps were finished in a turn of {end - begin:.2f} s: give it longer turns"
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
        """The same as a mean: of runs in which some turns have work in them that others have not."""
        return statistics.mean(self._ratios) - 1

    @property
    def _ratios(self) -> list[float]:
        return [one / other for one, other in zip(self.mine, self.others, strict=True)]


def take_turns(
    runs: Mapping[str, Mapping[str, Any]], folder: Path, warm_steps: int, turns: int, seconds: float
) -> dict[str, list[float]]:
    """{name of a run: seconds of an average step in each of its `turns`, of so many `seconds`}, each after `warm_steps` at least.

    Raises RunFailed where a run ends by itself; none is left then either.
    """
    players: list[Player] = []
    try:
        for name, sets in runs.items():
            players.append(
                _start(
                    name,
                    folder / name,
                    {**sets, "train.steps": ENDLESS, "train.log_every_steps": 10},
                )
            )
            _warm_up(players[-1], warm_steps)
        for number in range(turns):
            for player in players if number % 2 == 0 else reversed(players):
                player.play(seconds)
    finally:
        for player in players:
            player.end()
    try:
        return {
            player.name: step_seconds(read_run(player.folder).finished, player.turns)
            for player in players
        }
    finally:
        for player in players:
            shutil.rmtree(player.folder, ignore_errors=True)


def _start(name: str, folder: Path, sets: Mapping[str, Any]) -> Player:
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
    return Player(name, folder, process)


def _warm_up(player: Player, steps: int) -> None:
    """Let it run until events.jsonl says that so many steps are done, then stop it."""
    deadline = time.monotonic() + START_SECONDS
    while not _has_done(player.folder / "events.jsonl", steps):
        player.check()
        if time.monotonic() > deadline:
            raise RunFailed(f"{player.name} did not come to step {steps} in {START_SECONDS:g} s")
        time.sleep(0.1)
    player.signal(signal.SIGSTOP)


def _has_done(events: Path, steps: int) -> bool:
    return any(step >= steps for step in _progress(events))


def _progress(events: Path) -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError):
        yield from (
            event["step"]
            for event in parse_events(events.read_text())[0]
            if event["event"] == "progress"
        )

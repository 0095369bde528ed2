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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ecrm.drill.drill_runs import read_run
from ecrm.process.linux import session_members
from lib import measure

START_SECONDS, END_SECONDS = 120.0, 60.0
ENDLESS = 1_000_000
"""Steps of a run that is asked to stop when it has been measured."""
TELLS_OFTEN = {"train.log_every_steps": 10}
"""How often a run of ECRM tells of the steps that it has finished."""

Finished = Sequence[tuple[int, float]]
"""(step, seconds since the epoch) of every finishing of a step that a run has told of."""


class RunFailed(Exception):
    """A run ended by itself, or did not begin; the message says what it printed."""


@dataclass(frozen=True)
class Program:
    """What is started for a run, and what tells of its steps while it runs.

    `words` start it, with `environment` beside this program's own. SIGINT ends it. Its processes
    lie in sessions of their own: mpirun with its ranks under `ecrm launch`, each worker under
    torchrun.
    """

    words: Sequence[str]
    finished: Callable[[], Finished]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class InterleavedRun:
    """One run. It is stopped but when it `ran`: (begin, end) in seconds since the epoch.

    First it ran to warm up; its turns are the rest.
    """

    name: str
    program: Program
    process: subprocess.Popen[str]
    ran: list[tuple[float, float]] = field(default_factory=list)

    @property
    def turns(self) -> Sequence[tuple[float, float]]:
        return self.ran[1:]

    @property
    def members(self) -> list[int]:
        """All processes of the sessions that what was started has begun."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with contextlib.suppress(OSError):
            return [
                pid
                for session in children.read_text().split()
                for pid in session_members(int(session))
            ]
        return []

    def signal(self, number: int) -> None:
        for pid in self.members:
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
        self.ran.append((begin, time.time()))
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


def step_seconds(finished: Finished, turns: Sequence[tuple[float, float]]) -> list[float | None]:
    """Seconds of an average step of each turn, of the steps that begin and end in it.

    `None` for a turn without such a step.
    """
    found: list[float | None] = []
    for begin, end in turns:
        inside = [(step, at) for step, at in finished if begin < at < end]
        found.append(
            (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])
            if len(inside) > 1
            else None
        )
    return found


def counted(seconds: Mapping[str, Sequence[float | None]]) -> dict[str, list[float]]:
    """The turns in which every run has a step; ratios are of neighbours, so all or none count.

    Raises ValueError if fewer than half of the turns are left.
    """
    turns = list(zip(*seconds.values(), strict=True))
    whole = [turn for turn in turns if None not in turn]
    if 2 * len(whole) < len(turns):
        without = {name: list(mine).count(None) for name, mine in seconds.items()}
        told = ", ".join(f"{name} {count}" for name, count in without.items() if count)
        raise ValueError(
            f"only {len(whole)} of {len(turns)} turns have a step of every run (turns without: "
            f"{told}): give longer turns"
        )
    return {name: [turn[place] for turn in whole] for place, name in enumerate(seconds)}


def running(finished: Finished, ran: Sequence[tuple[float, float]]) -> Finished:
    """The same steps, in time without the stops between the spans in which the run `ran`."""
    stops = [(end, begin) for (_, end), (begin, _) in pairwise(ran)]
    return [
        (step, at - sum(begin - end for end, begin in stops if begin <= at))
        for step, at in finished
    ]


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


def interleave(
    programs: Mapping[str, Program],
    warm_steps: int,
    turns: int,
    seconds: Callable[[Finished], float],
) -> dict[str, list[float]]:
    """Seconds of an average step in each turn, by the name of the run.

    Each of the `programs` has `turns`, after at least `warm_steps` steps. `seconds` says how long
    the next turn is, from the steps that it has told of until then, in time without stops: a slower
    machine gets longer turns. A turn without a step of some run counts for no run. All runs are
    gone afterwards. Raises RunFailed where one ends by itself; ValueError like `counted`.
    """
    started: list[InterleavedRun] = []
    try:
        for name, program in programs.items():
            started.append(start(name, program))
            _warm_up(started[-1], warm_steps)
        for number in range(turns):
            for run in started if number % 2 == 0 else reversed(started):
                run.continue_for(seconds(running(run.program.finished(), run.ran)))
    finally:
        for run in started:
            run.end()
    return counted({run.name: step_seconds(run.program.finished(), run.turns) for run in started})


def run_interleaved(
    runs: Mapping[str, Mapping[str, Any]], folder: Path, warm_steps: int, turns: int, seconds: float
) -> dict[str, list[float]]:
    """The same of runs of configs, in turns of so many `seconds`.

    `runs` are the config keys of each run.
    """
    programs = {name: built_in(folder / name, sets) for name, sets in runs.items()}
    try:
        return interleave(programs, warm_steps, turns, lambda _: seconds)
    finally:
        for name in programs:
            shutil.rmtree(folder / name, ignore_errors=True)


def built_in(folder: Path, sets: Mapping[str, Any]) -> Program:
    """An endless run of a config in a run folder."""
    sets = {**sets, **TELLS_OFTEN, "train.steps": ENDLESS}
    return launched(["quickstart", *measure.set_words(sets)], folder)


def launched(what: Sequence[str], folder: Path, arguments: Sequence[str] = ()) -> Program:
    """`ecrm launch` of a config or a script, in a run folder, with a script's own `arguments`."""
    words = [sys.executable, "-m", "ecrm", "launch", *what, "--run-dir", str(folder)]
    own = ["--", *arguments] if arguments else []
    return Program([*words, *own], lambda: read_run(folder).finished)


def ratios_of(mine: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Ratios of neighbouring turns: the median, and the percentiles 20 and 80."""
    ratios = [one / other for one, other in zip(mine, others, strict=True)]
    p20, *_, p80 = statistics.quantiles(ratios, n=5, method="inclusive")
    return statistics.median(ratios), p20, p80


def several_steps(steps: int, least: float = 0.5) -> Callable[[Finished], float]:
    """Turns as long as so many steps at the pace of the last ones, and at least `least` seconds."""

    def seconds(finished: Finished) -> float:
        pace = [(to - at) / (last - step) for (step, at), (last, to) in pairwise(finished)]
        return max(least, steps * statistics.median(pace[len(pace) // 2 :]))

    return seconds


def start(name: str, program: Program) -> InterleavedRun:
    """Start a program; its end is `InterleavedRun.end`."""
    process = subprocess.Popen(
        program.words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **program.environment},
    )
    return InterleavedRun(name, program, process)


def _warm_up(run: InterleavedRun, steps: int) -> None:
    """Let it run until it has told that so many steps are done, then stop it."""
    begin, deadline = time.time(), time.monotonic() + START_SECONDS
    while not any(step >= steps for step, _ in run.program.finished()):
        run.check()
        if time.monotonic() > deadline:
            raise RunFailed(f"{run.name} did not come to step {steps} in {START_SECONDS:g} s")
        time.sleep(0.1)
    run.signal(signal.SIGSTOP)
    run.ran.append((begin, time.time()))

"""`ecrm simulate`: fault schedules by the thousand on the real engine, or one of them again."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from ecrm.errors import EcrmError, UsageError
from ecrm.progress_line import Progress
from ecrm.wording import counted

if TYPE_CHECKING:
    from ecrm.simulate.simulation import Verdict

CHUNK = 20
PLAIN_SECONDS = 30.0


class SimulationFailed(EcrmError):
    """A schedule broke a promise."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "simulate", help="run random fault schedules on the real engine in a simulated cluster"
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--seed",
        metavar="SEED",
        help="run one schedule and print it; a number, or any text such as a commit hash",
    )
    which.add_argument("--seeds", metavar="A:B", help="run the schedules of seeds A to B-1")
    parser.add_argument(
        "--suite",
        choices=("survivable", "fatal", "both"),
        default="both",
        help="survivable: only faults that must be survived; fatal: one death more than that; "
        "by default both",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes; by default as many as there are cores",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from ecrm.simulate.schedule import SUITES, parse_seed

    suites = SUITES if args.suite == "both" else (args.suite,)
    if args.seed is not None:
        for suite in suites:
            _replay(parse_seed(args.seed), suite)
        return 0
    seeds = _range(args.seeds)
    if args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs}: at least 1")
    for suite in suites:
        verb = f"simulate, {suite}"
        with Progress(verb, sys.stderr, noun="schedules", plain_seconds=PLAIN_SECONDS) as progress:
            totals = run_range(seeds, suite, args.jobs, progress)
        print(totals, flush=True)
    return 0


def _range(text: str) -> range:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise UsageError(f"--seeds {text}: type A:B with A below B, such as 0:1000")
    return range(int(match[1]), int(match[2]))


def _replay(seed: int, suite: str) -> None:
    """Run one schedule and print what it was and what became of it; raises SimulationFailed."""
    from ecrm.simulate.schedule import draw

    print(f"{suite} seed {seed}: {draw(seed, suite)}")
    verdict = _judged(seed, suite)
    how = f"refused: {verdict.refused}" if verdict.refused else "finished with the oracle's bits"
    print(
        f"  {counted(verdict.deaths, 'death')}, {counted(verdict.recoveries, 'recovery', 'recoveries')}, {counted(verdict.reshapes, 'reshape')}, {counted(verdict.commits, 'commit')} checked "
        f"({verdict.rows_checked:,} rows, {verdict.parity_rows_checked:,} parity rows), {verdict.calls:,} calls; {how}"
    )


@dataclass
class Totals:
    """What became of the schedules of a range, and how many faults were of which kind; printed as two lines."""

    suite: str
    jobs: int
    schedules: int = 0
    deaths: int = 0
    recoveries: int = 0
    reshapes: int = 0
    refused: int = 0
    commits: int = 0
    rows_checked: int = 0
    calls: int = 0
    seconds: float = 0.0
    mix: Counter[str] = field(default_factory=Counter)

    def count(self, verdict: Verdict) -> None:
        self.schedules += 1
        self.refused += verdict.refused is not None
        self.mix += verdict.mix
        for name in ("deaths", "recoveries", "reshapes", "commits", "rows_checked", "calls"):
            setattr(self, name, getattr(self, name) + getattr(verdict, name))

    def so_far(self) -> str:
        """What has come of those that have run, in plain words."""
        return f"{self.deaths:,} ranks killed, nothing wrong"

    def __str__(self) -> str:
        return (
            f"{self.suite}: {self.schedules:,} schedules, {self.deaths:,} deaths, {self.recoveries:,} recoveries, "
            f"{self.reshapes:,} reshapes, {self.refused:,} refusals, {self.commits:,} commits and {self.rows_checked:,} rows checked, "
            f"{self.calls:,} calls; {self.schedules / self.seconds:.1f} schedules/s on {self.jobs} process{'' if self.jobs == 1 else 'es'}\n"
            f"  {', '.join(f'{count:,} {kind}' for kind, count in sorted(self.mix.items()))}"
        )


def run_range(seeds: range, suite: str, jobs: int, progress: Progress | None = None) -> Totals:
    """Run a range of schedules in `jobs` processes (1: in this one). Raises SimulationFailed at the first failure."""
    began, totals = time.monotonic(), Totals(suite, jobs)
    chunks = list(_chunks(seeds))
    work = [(suite, chunk) for chunk in chunks]
    done = 0
    # a fork of a process in which torch has threads may crash
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, fresh) if jobs > 1 else contextlib.nullcontext() as pool:
        try:
            for verdicts in map(_run_some, work) if pool is None else pool.map(_run_some, work):
                done += 1
                for verdict in verdicts:
                    totals.count(verdict)
                if progress is not None:
                    share = totals.schedules / len(seeds)
                    progress.update(totals.schedules, totals.so_far(), share)
        except SimulationFailed:
            if pool is not None:
                pool.shutdown(cancel_futures=True)
            raise
        except BrokenProcessPool:
            last = chunks[min(done + jobs, len(chunks)) - 1][-1]
            raise SimulationFailed(
                f"a process died running schedules\nreplay: ecrm simulate --seeds {chunks[done][0]}:{last + 1} --suite {suite} --jobs 1"
            ) from None
    totals.seconds = time.monotonic() - began
    return totals


def _chunks(seeds: Iterable[int]) -> Iterator[list[int]]:
    rest = iter(seeds)
    while chunk := list(islice(rest, CHUNK)):
        yield chunk


def _run_some(work: tuple[str, list[int]]) -> list[Verdict]:
    """What became of some schedules."""
    suite, seeds = work
    return [_judged(seed, suite) for seed in seeds]


def _judged(seed: int, suite: str) -> Verdict:
    """What became of one schedule; whatever goes wrong is a SimulationFailed with the line that replays it."""
    from ecrm.simulate.schedule import draw
    from ecrm.simulate.simulation import Failed, run_schedule

    try:
        return run_schedule(draw(seed, suite))
    except Exception as error:
        told = (
            str(error) if isinstance(error, Failed) else "".join(traceback.format_exception(error))
        )
        raise SimulationFailed(
            f"{told.rstrip()}\nreplay: ecrm simulate --seed {seed} --suite {suite}"
        ) from None

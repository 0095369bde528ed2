"""Run a range of fault schedules in one process or several, and count the outcomes."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from ecrm.base.console import Progress
from ecrm.base.errors import EcrmError

if TYPE_CHECKING:
    from ecrm.testing.simulate.simulation import Verdict

CHUNK = 20


class SimulationFailed(EcrmError):
    """A schedule broke a promise."""


@dataclass
class Totals:
    """Sums over the schedules of a range: outcomes, checks, and faults by kind (`mix`).

    The text has two lines.
    """

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
        """The words for the progress line."""
        return f"{self.deaths:,} ranks killed, nothing wrong"

    def __str__(self) -> str:
        return (
            f"{self.suite}: {self.schedules:,} schedules, {self.deaths:,} deaths, "
            f"{self.recoveries:,} recoveries, {self.reshapes:,} reshapes, "
            f"{self.refused:,} refusals, {self.commits:,} commits and "
            f"{self.rows_checked:,} rows checked, {self.calls:,} calls; "
            f"{self.schedules / self.seconds:.1f} schedules/s on {self.jobs} "
            f"process{'' if self.jobs == 1 else 'es'}\n"
            f"  {', '.join(f'{count:,} {kind}' for kind, count in sorted(self.mix.items()))}"
        )


def run_range(seeds: range, suite: str, jobs: int, progress: Progress | None = None) -> Totals:
    """Run a range of schedules in `jobs` processes, or in the calling process for 1 job.

    Raises SimulationFailed at the first failure.
    """
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
                "a process died running schedules\n"
                f"replay: ecrm simulate --seeds {chunks[done][0]}:{last + 1} "
                f"--suite {suite} --jobs 1"
            ) from None
    totals.seconds = time.monotonic() - began
    return totals


def _chunks(seeds: Iterable[int]) -> Iterator[list[int]]:
    rest = iter(seeds)
    while chunk := list(islice(rest, CHUNK)):
        yield chunk


def _run_some(work: tuple[str, list[int]]) -> list[Verdict]:
    """The verdicts of the schedules of some seeds."""
    suite, seeds = work
    return [judged(seed, suite) for seed in seeds]


def judged(seed: int, suite: str) -> Verdict:
    """The verdict of a schedule.

    Raises SimulationFailed for any error, with the command line that replays the schedule.
    """
    from ecrm.testing.simulate.schedule import draw
    from ecrm.testing.simulate.simulation import Failed, run_schedule

    try:
        return run_schedule(draw(seed, suite))
    except Exception as error:
        told = (
            str(error) if isinstance(error, Failed) else "".join(traceback.format_exception(error))
        )
        raise SimulationFailed(
            f"{told.rstrip()}\nreplay: ecrm simulate --seed {seed} --suite {suite}"
        ) from None

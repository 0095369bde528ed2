"""`ecrm simulate`: fault schedules by the thousand on the real engine, or one of them again."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

from ecrm.errors import EcrmError, UsageError

CHUNK = 20


class SimulationFailed(EcrmError):
    """A schedule broke a promise."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Register the command."""
    parser = commands.add_parser("simulate", help="run fault schedules on the real engine over a simulated cluster")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", metavar="SEED", help="replay one schedule; a number, or any text such as a commit hash")
    which.add_argument("--seeds", metavar="A:B", help="run the schedules of seeds A to B-1")
    parser.add_argument(
        "--suite",
        choices=("survivable", "fatal", "both"),
        default="both",
        help="survivable = only what is promised to be survived, fatal = one death more than that; default both",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes; default: the cores")
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
        print(run_range(seeds, suite, args.jobs), flush=True)
    return 0


def _range(text: str) -> range:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise UsageError(f"--seeds {text}: type A:B with A below B, such as 0:1000")
    return range(int(match[1]), int(match[2]))


def _replay(seed: int, suite: str) -> None:
    """Run one schedule and print what it was and what became of it; raises SimulationFailed."""
    from ecrm.simulate.run import Failed, run_schedule
    from ecrm.simulate.schedule import draw

    schedule = draw(seed, suite)
    print(f"{suite} seed {seed}: {schedule}")
    try:
        verdict = run_schedule(schedule)
    except Failed as error:
        raise SimulationFailed(_complaint(seed, suite, str(error))) from None
    how = f"refused: {verdict.refused}" if verdict.refused else "finished with the oracle's bits"
    print(
        f"  {verdict.deaths} deaths, {verdict.recoveries} recoveries, {verdict.reshapes} reshapes, {verdict.commits} commits checked "
        f"({verdict.rows_checked:,} rows, {verdict.parity_rows_checked:,} parity rows), {verdict.calls:,} calls; {how}"
    )


def run_range(seeds: range, suite: str, jobs: int) -> str:
    """Run a range of schedules in `jobs` processes (1: in this one); a line of totals. Raises SimulationFailed at the first failure."""
    began = time.monotonic()
    totals = dict.fromkeys(("deaths", "recoveries", "reshapes", "commits", "calls", "refused", "rows_checked"), 0)
    work = ((suite, chunk) for chunk in _chunks(seeds))
    with ProcessPoolExecutor(jobs) if jobs > 1 else contextlib.nullcontext() as pool:
        for counted in map(_run_some, work) if pool is None else pool.map(_run_some, work):
            if "failed" in counted:
                if pool is not None:
                    pool.shutdown(cancel_futures=True)
                raise SimulationFailed(counted["failed"])
            for name in totals:
                totals[name] += counted[name]
    seconds = time.monotonic() - began
    return (
        f"{suite}: {len(seeds):,} schedules, {totals['deaths']:,} deaths, {totals['recoveries']:,} recoveries, "
        f"{totals['reshapes']:,} reshapes, "
        f"{totals['refused']:,} refusals, {totals['commits']:,} commits and {totals['rows_checked']:,} rows checked, "
        f"{totals['calls']:,} calls; {len(seeds) / seconds:.1f} schedules/s on {jobs} process{'' if jobs == 1 else 'es'}"
    )


def _chunks(seeds: Iterable[int]) -> Iterator[list[int]]:
    rest = iter(seeds)
    while chunk := list(islice(rest, CHUNK)):
        yield chunk


def _run_some(work: tuple[str, list[int]]) -> dict:
    """Totals of some schedules, or {"failed": complaint}."""
    from ecrm.simulate.run import Failed, run_schedule
    from ecrm.simulate.schedule import draw

    suite, seeds = work
    totals = dict.fromkeys(("deaths", "recoveries", "reshapes", "commits", "calls", "refused", "rows_checked"), 0)
    for seed in seeds:
        try:
            verdict = run_schedule(draw(seed, suite))
        except Failed as error:
            return {"failed": _complaint(seed, suite, str(error))}
        for name in totals:
            totals[name] += int(bool(verdict.refused)) if name == "refused" else getattr(verdict, name)
    return totals


def _complaint(seed: int, suite: str, error: str) -> str:
    return f"{error}\nreplay: ecrm simulate --seed {seed} --suite {suite}"

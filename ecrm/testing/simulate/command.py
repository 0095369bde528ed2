"""`ecrm simulate`: run thousands of fault schedules on the real engine, or replay one schedule."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys

from ecrm.base.console import Progress
from ecrm.base.errors import UsageError
from ecrm.base.requirements import TORCHREC
from ecrm.base.wording import counted
from ecrm.testing.simulate.seed_range import judged, run_range

PLAIN_SECONDS = 30.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
        choices=("survivable", "fatal", "returning", "links", "sessions", "all"),
        default="all",
        help="survivable: only faults that must be survived; fatal: one death more than that; "
        "returning: dead ranks come back; "
        "links: ranks talk over links that are reset, slow or cut; "
        "sessions: faults of both kinds while scripts train random models, which needs torchrec; "
        "by default all",
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
    seeds = range(0) if args.seeds is None else _range(args.seeds)
    if args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs}: at least 1")
    # kernels of an imitated GPU are interpreted; triton reads the variable only at its import
    os.environ["TRITON_INTERPRET"] = "1"
    from ecrm.testing.simulate.schedule import SUITES, parse_seed

    suites = SUITES if args.suite == "all" else (args.suite,)
    if "sessions" in suites and importlib.util.find_spec("torchrec") is None:
        raise UsageError(
            f"--suite {args.suite}: sessions train models of torchrec, which is not installed",
            otherwise=f"type {TORCHREC}, or --suite survivable or --suite fatal",
        )
    if args.seed is not None:
        for suite in suites:
            _replay(parse_seed(args.seed), suite)
        return 0
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
    """Run a schedule, and print the schedule and the outcome; raises SimulationFailed."""
    from ecrm.testing.simulate.schedule import draw

    print(f"{suite} seed {seed}: {draw(seed, suite)}")
    verdict = judged(seed, suite)
    how = f"refused: {verdict.refused}" if verdict.refused else "finished with the oracle's bits"
    print(
        f"  {counted(verdict.deaths, 'death')}, "
        f"{counted(verdict.recoveries, 'recovery', 'recoveries')}, "
        f"{counted(verdict.reshapes, 'reshape')}, {counted(verdict.commits, 'commit')} checked "
        f"({verdict.rows_checked:,} rows, {verdict.parity_rows_checked:,} parity rows), "
        f"{verdict.calls:,} calls; {how}"
    )

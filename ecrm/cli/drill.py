"""The command `ecrm drill`; heavy imports happen only when the command runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ecrm.config.script import Script


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_run_options: Callable[[argparse.ArgumentParser], None],
    usage: str,
    trained: Callable[[argparse.Namespace], str | Script],
) -> None:
    """Add the parser of `ecrm drill`.

    `commands` comes from `argparse.ArgumentParser.add_subparsers`. `add_run_options` adds the
    options shared with `ecrm launch`: CONFIG, --set, --run-dir, --kill, and for a script --config.
    `trained` returns the config or script typed as CONFIG or SCRIPT.py.
    """
    parser = commands.add_parser(
        "drill",
        help="train twice, undisturbed and with ranks killed; compare in a table and a page",
        usage=usage,
    )
    add_run_options(parser)
    # Parsed later from text, so a wrong value gives a one-line error, as for every option.
    parser.add_argument(
        "--mtbf",
        metavar="SECONDS",
        help="instead of --kill: send SIGKILL to random live ranks, with exponential gaps of this "
        "mean",
    )
    parser.add_argument(
        "--kill-host",
        action="append",
        default=[],
        metavar="HOST@STEP",
        help="instead of --kill: send SIGKILL to all ranks of a host as this step begins; "
        "repeatable. HOST is a name in ranks.json, or its number: "
        "hosts count from 0, ordered by their lowest rank",
    )
    parser.add_argument(
        "--kills",
        metavar="N",
        help="with --mtbf: kill exactly N ranks; by default as many as the run has time for",
    )
    parser.add_argument(
        "--seed", metavar="S", help="with --mtbf: seed of gaps and ranks; by default 0"
    )
    parser.set_defaults(run=lambda args: _run(args, trained(args)))


def _run(args: argparse.Namespace, trained: str | Script) -> int:
    from ecrm.drill.drill_runs import drill

    return drill(
        trained,
        args.set,
        args.run_dir,
        args.kill,
        args.mtbf,
        args.kills,
        args.seed,
        args.kill_host,
    )

"""The command `ecrm plan`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from ecrm.base.errors import UsageError
from ecrm.config.script import Script
from ecrm.run.surveyed import survey

GBIT = 1e9 / 8


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_script: Callable[[argparse.ArgumentParser], None],
    usage: str,
    trained: Callable[[argparse.Namespace], str | Script],
) -> None:
    """Add the parser of `ecrm plan` to the parsers of an `ArgumentParser`.

    `add_script` adds the options of a script, `trained` returns the config or the script.
    """
    parser = commands.add_parser(
        "plan",
        usage=usage,
        help="compare stripes of k + m for a cluster: memory, traffic, overhead, rebuilding, data "
        "loss; recommend one",
    )
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="TOML file or name of a shipped config, or SCRIPT.py, which runs up to its training",
    )
    add_script(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="set one config value; repeatable",
    )
    for name, metavar, meaning in (
        ("--servers", "N", "servers, one to a host"),
        ("--memory", "GB", "memory of a server's host"),
        ("--network", "GBIT", "network of a server's host, in Gbit/s"),
        ("--mtbf", "HOURS", "mean time between failures of a server"),
    ):
        parser.add_argument(name, metavar=metavar, required=True, help=meaning)
    parser.add_argument(
        "--step-ms",
        metavar="MS",
        default="100",
        help="time of a step, as told by a short run; by default 100",
    )
    parser.set_defaults(run=lambda args: _run(args, trained(args)))


def _run(args: argparse.Namespace, trained: str | Script) -> int:
    from ecrm.launch.sizing import Planned, in_words, of_config, of_script

    servers = _number("--servers", args.servers)
    if servers != int(servers):
        raise UsageError(f"--servers {args.servers}: not a whole number")
    given = Planned(
        servers=int(servers),
        memory_bytes=_number("--memory", args.memory) * 1e9,
        network_bytes=_number("--network", args.network) * GBIT,
        mtbf_seconds=_number("--mtbf", args.mtbf) * 3600,
        step_seconds=_number("--step-ms", args.step_ms) / 1e3,
    )
    if isinstance(trained, Script):
        trained.load_config([*args.set, *given.settings(1, 1)])  # before the script runs
        model = of_script(trained, args.set, survey(trained))
    else:
        model = of_config(trained, args.set)
    print("\n".join(in_words(model, given)))
    return 0


def _number(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"{option} {text}: not a number above 0")
    return value

"""The command `ecrm plan`."""

from __future__ import annotations

import argparse
import math

from ecrm.base.errors import UsageError

GBIT = 1e9 / 8


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of `ecrm plan` to the parsers of an `ArgumentParser`."""
    parser = commands.add_parser(
        "plan",
        help="compare stripes of k + m for a cluster: memory, traffic, overhead, rebuilding, data "
        "loss; recommend one",
    )
    parser.add_argument("config", metavar="CONFIG", help="TOML file or name of a shipped config")
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
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from ecrm.config.script import is_script
    from ecrm.launch.sizing import Planned, in_words

    if is_script(args.config):
        raise UsageError(
            f"{args.config}: the tables of a script are known only as the script runs",
            otherwise="name a config, and data of as many rows: "
            "ecrm plan quickstart --set data.path=DIR",
        )
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
    print("\n".join(in_words(args.config, args.set, given)))
    return 0


def _number(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"{option} {text}: not a number above 0")
    return value

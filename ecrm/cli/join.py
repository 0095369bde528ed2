"""The command `ecrm join`."""

from __future__ import annotations

import argparse

from ecrm.base.paths import typed_path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of `ecrm join` to the parsers of an `ArgumentParser`."""
    parser = commands.add_parser(
        "join",
        help="typed on a host: be the lost ranks of the host, in a run of `ecrm launch --hosts` "
        "that goes on; ends with the run. Typed on the head machine: the same on the host",
    )
    parser.add_argument("folder", metavar="RUN", type=typed_path, help="the folder of the run")
    parser.add_argument(
        "--host",
        metavar="NAME",
        required=True,
        help="the name of the host, as in the hosts file",
    )
    parser.add_argument(
        "--place",
        metavar="NAME",
        help="the lost host whose ranks the host takes; by default the host itself",
    )
    parser.add_argument(
        "--here",
        action="store_true",
        help="this machine is the host, whatever its address; by default `ecrm join` on the head "
        "machine starts the ranks on the host",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from ecrm.launch.join import join

    return join(args.folder, args.host, args.place, args.here)

"""The command `ecrm report`."""

from __future__ import annotations

import argparse

from ecrm.base.paths import typed_path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of `ecrm report` to the parsers of an `ArgumentParser`."""
    parser = commands.add_parser(
        "report",
        help="write a run as one HTML page: curves, throughput, roles, failures, checkpoints",
    )
    parser.add_argument("folder", metavar="RUN", type=typed_path, help="the folder of the run")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=typed_path,
        help="file to write, replaced if it exists; by default report.html in the folder of the "
        "run",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from ecrm.drill.run_page import report

    print(f"report in {report(args.folder, args.output)}")
    return 0

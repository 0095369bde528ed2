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
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--output",
        metavar="FILE",
        type=typed_path,
        help="file to write, replaced if it exists; by default report.html in the folder of the "
        "run",
    )
    either.add_argument(
        "--values",
        action="store_true",
        help="write no page, and print the values of the run, as `hooks.logger` gets the values: a "
        "JSON object a line",
    )
    parser.add_argument(
        "--session",
        metavar="N",
        type=int,
        help="the number of a session, of a script with several; by default the newest session",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.values:
        from ecrm.launch.logger_hook import ValueLines
        from ecrm.launch.run_state import run_state
        from ecrm.run.session_folders import told_session

        run_state(args.folder)  # refuses a folder without a run
        for line in ValueLines(told_session(args.folder, args.session)).new():
            print(line)
        return 0
    from ecrm.drill.run_page import report

    print(f"report in {report(args.folder, args.output, args.session)}")
    return 0

"""The command `ecrm status`."""

from __future__ import annotations

import argparse

from ecrm.base.paths import typed_path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of `ecrm status` to the parsers of an `ArgumentParser`."""
    parser = commands.add_parser(
        "status",
        help="print how far a run is, and the state of every rank. Ends with 0 for a run that "
        "lives or is complete, else with the exit code of the run: 130 for a stopped run, 1 for a "
        "run that died without a word",
    )
    parser.add_argument("folder", metavar="RUN", type=typed_path, help="the folder of the run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from ecrm.launch.run_state import as_json, as_text, run_state

    state = run_state(args.folder)
    print(as_json(state) if args.json else as_text(state))
    return state.exit_code

"""The commands `ecrm schema` and `ecrm prepare table`.

Their heavy imports happen only when a command runs.
"""

from __future__ import annotations

import argparse
import sys

from ecrm.base.paths import typed_path, typed_path_text
from ecrm.base.wording import counted, listed
from ecrm.data.dataset_info import JUDGED_LINES, MAX_MALFORMED

Kinds = argparse._SubParsersAction


def add_schema(subparsers: Kinds[argparse.ArgumentParser]) -> None:
    """Add the parser of `schema`."""
    parser = subparsers.add_parser(
        "schema", help="print a draft of the schema of Parquet, Arrow, CSV or TSV files"
    )
    _add_inputs(parser, "files with the same columns; of each file the first rows are read")
    parser.set_defaults(run=_run_schema)


def add_prepare_table(kinds: Kinds[argparse.ArgumentParser]) -> None:
    """Add the parser of `prepare table`."""
    parser = kinds.add_parser(
        "table", help="Parquet, Arrow, CSV or TSV files with any columns, named by a schema"
    )
    _add_inputs(parser, "files in the order of time, unless the schema has a column of kind time")
    parser.add_argument(
        "--schema",
        required=True,
        type=typed_path,
        metavar="FILE",
        help="TOML file with the kind of every column; `ecrm schema` prints a draft",
    )
    parser.add_argument(
        "--output", required=True, type=typed_path_text, metavar="DIR", help="folder to make"
    )
    add_skipping(parser, "row")
    parser.add_argument(
        "--vocabularies",
        type=typed_path,
        metavar="DIR",
        help="use the vocabularies of a table prepared before: known values keep their rows, and "
        "unknown values get row 0",
    )
    add_threads(parser)
    parser.add_argument("--force", action="store_true", help="replace a table already in DIR")
    parser.set_defaults(run=_run_prepare)


def add_skipping(parser: argparse.ArgumentParser, unit: str) -> None:
    """Add the options about malformed rows; `unit` is the noun of a row."""
    skipping = parser.add_mutually_exclusive_group()
    skipping.add_argument(
        "--strict",
        action="store_true",
        help=f"stop at the first malformed {unit} instead of skipping and counting it",
    )
    skipping.add_argument(
        "--max-malformed",
        type=float,
        default=MAX_MALFORMED,
        metavar="SHARE",
        help=f"stop when more than this share of a file's {unit}s is malformed; from 0 to 1, by "
        f"default {MAX_MALFORMED:g}. The share is first checked after {JUDGED_LINES:,} {unit}s of "
        "a file, or at its end if it is shorter",
    )


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Add the number of threads that convert rows."""
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads at work; by default one for each core"
    )


def _add_inputs(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("inputs", nargs="+", type=typed_path_text, metavar="INPUT", help=meaning)


def _run_schema(args: argparse.Namespace) -> int:
    from ecrm.data.columns.draft import draft

    print(draft(args.inputs), end="")
    return 0


def _run_prepare(args: argparse.Namespace) -> int:
    from ecrm.base.console import Progress
    from ecrm.data.columns.schema import load_schema

    schema = load_schema(args.schema)
    from ecrm.data.columns.prepare import prepare_table

    with Progress("prepare", sys.stderr) as progress:
        manifest = prepare_table(
            args.inputs,
            args.output,
            schema,
            args.max_malformed,
            strict=args.strict,
            force=args.force,
            vocabularies=args.vocabularies,
            threads=args.threads,
            progress=progress,
        )
    rows, malformed = manifest["rows"], sum(source["malformed"] for source in manifest["sources"])
    held_out = rows - manifest["train_rows"]
    evaluated = f"{held_out:,} of them" if held_out else "no rows are"
    size = sum(record["bytes"] for record in manifest["files"].values())
    named = " (named in malformed.txt)" if malformed else ""
    print(
        f"{args.output}: {rows:,} rows, {evaluated} held out, "
        f"label {manifest['label_mean']:.4g} on average, "
        f"{counted(malformed, 'malformed row')} skipped{named}, "
        f"{sum(manifest['tables'].values()):,} table rows, {size / 1e6:,.1f} MB"
    )
    for word in ("missing", "unknown"):
        counts = {name: count for name, count in manifest[word].items() if count}
        if counts:
            print(f"{word} values: {listed([f'{n} {count:,}' for n, count in counts.items()])}")
    return 0

"""The commands `ecrm prepare criteo` and `ecrm generate criteo`; `ecrm.cli.table` has the others.

Their heavy imports happen only when a command runs.
"""

from __future__ import annotations

import argparse
import sys

from ecrm.base.errors import UsageError
from ecrm.base.paths import typed_path_text
from ecrm.base.wording import counted
from ecrm.cli.table import add_prepare_table, add_schema, add_skipping, add_threads

ZIPF_VALUES = 1_000_000


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parsers of `prepare`, `schema` and `generate`.

    `subparsers` comes from `argparse.ArgumentParser.add_subparsers`. The parsers set `run`, a
    function from parsed arguments to the exit code; `run` raises `EcrmError`.
    """
    kinds = _add_kinds(subparsers, "prepare", "turn click logs into a dataset for training")
    parser = kinds.add_parser(
        "criteo",
        help="Criteo text: Kaggle's train.txt, Terabyte's day_N, csv with a header; plain or .gz",
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        type=typed_path_text,
        metavar="INPUT",
        help="text files in the order of time: day_{0..23}, not day_*",
    )
    parser.add_argument(
        "--output",
        required=True,
        type=typed_path_text,
        metavar="DIR",
        help="dataset directory to make",
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--hash-size", type=int, metavar="N", help="rows of each of the 26 tables")
    sizes.add_argument(
        "--hash-sizes", metavar="N,N,...", help="rows of the 26 tables, one number each"
    )
    add_skipping(parser, "line")
    add_threads(parser)
    parser.add_argument(
        "--force", action="store_true", help="replace a dataset that is already in DIR"
    )
    parser.set_defaults(run=_run_prepare)
    add_prepare_table(kinds)
    add_schema(subparsers)

    kinds = _add_kinds(
        subparsers, "generate", "write artificial click logs that a model can learn from"
    )
    parser = kinds.add_parser(
        "criteo", help="rows in the layout of Kaggle's train.txt and with its statistics"
    )
    parser.add_argument("--rows", type=int, required=True, metavar="N", help="number of rows")
    parser.add_argument(
        "--seed",
        type=int,
        required=True,
        metavar="S",
        help="seed of all randomness; with the same seed, a longer file starts with a shorter one",
    )
    parser.add_argument(
        "--output",
        required=True,
        type=typed_path_text,
        metavar="FILE",
        help="file to write, replaced if it exists; compressed if it ends in .gz",
    )
    parser.add_argument(
        "--zipf",
        metavar="LOW:HIGH",
        help="draw category values by Zipf's law, with exponents from LOW to HIGH over the "
        "columns; see --values",
    )
    parser.add_argument(
        "--values",
        type=int,
        metavar="N",
        help=f"with --zipf: different values of each column; by default {ZIPF_VALUES:,}",
    )
    parser.set_defaults(run=_run_generate)


def _add_kinds(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], name: str, help_text: str
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Add a command and return the subparsers for its kinds of data."""
    return subparsers.add_parser(name, help=help_text).add_subparsers(
        dest="kind", required=True, metavar="KIND"
    )


def parse_hash_sizes(text: str) -> list[int]:
    """Return the numbers of a comma-separated list; raises `UsageError` for invalid numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--hash-sizes: {error}") from error


def parse_zipf(text: str) -> tuple[float, float]:
    """Return LOW and HIGH of `LOW:HIGH`; raises `UsageError` unless the text has two numbers."""
    try:
        low, high = text.split(":")
        return float(low), float(high)
    except ValueError as error:
        raise UsageError(f"--zipf {text}: it must be two numbers, as in 1.05:1.2") from error


def _run_prepare(args: argparse.Namespace) -> int:
    from ecrm.base.console import Progress
    from ecrm.data.prepare import prepare

    sizes = parse_hash_sizes(args.hash_sizes) if args.hash_sizes is not None else args.hash_size
    with Progress("prepare", sys.stderr) as progress:
        manifest = prepare(
            args.inputs,
            args.output,
            sizes,
            strict=args.strict,
            force=args.force,
            progress=progress,
            max_malformed=args.max_malformed,
            threads=args.threads,
        )
    rows, malformed = manifest["rows"], sum(source["malformed"] for source in manifest["sources"])
    size = sum(record["bytes"] for record in manifest["files"].values())
    named = " (named in malformed.txt)" if malformed else ""
    print(
        f"{args.output}: {rows:,} rows, {manifest['clicks'] / rows:.2%} clicks, "
        f"{counted(malformed, 'malformed line')} skipped{named}, "
        f"{sum(manifest['tables'].values()):,} table rows, {size / 1e6:,.1f} MB"
    )
    return 0


def _run_generate(args: argparse.Namespace) -> int:
    from ecrm.base.console import Progress
    from ecrm.data.categories import KAGGLE, zipf
    from ecrm.data.generate import generate_criteo

    if args.values is not None and args.zipf is None:
        raise UsageError(
            "--values goes with --zipf: without it columns have as many values as Kaggle's"
        )
    values = ZIPF_VALUES if args.values is None else args.values
    categories = KAGGLE if args.zipf is None else zipf(*parse_zipf(args.zipf), values)
    with Progress("generate", sys.stderr) as progress:
        made = generate_criteo(args.rows, args.seed, args.output, progress, categories)
    print(
        f"{args.output}: {made.rows:,} rows, {made.clicks / made.rows:.2%} clicks, "
        f"{made.file_bytes / 1e6:,.1f} MB; the true probabilities reach "
        f"AUC {made.attainable_auc:.4f}, log loss {made.attainable_logloss:.4f}"
    )
    return 0

"""The manifest of a prepared table: the files, their contents, and checks of completeness."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

from ecrm.base.errors import DataError, EcrmError, UsageError
from ecrm.data import dataset_info
from ecrm.data.columns.schema import Column, Schema, parse_schema

NAME = dataset_info.NAME
FORMAT = "ecrm-table"
VERSION = 2

LABELS, DENSE, IDS, ORDER = "labels.bin", "dense.bin", "ids.bin", "order.bin"


def bag_file(feature: int, part: str) -> str:
    """The name of a file of a feature with any number of ids; features are numbered from 0.

    `part` is "ends", "ids" or "weights".
    """
    return f"feature-{feature}-{part}.bin"


def vocabulary_file(table: int) -> str:
    """The name of the file with the values of a table; tables are numbered from 0."""
    return f"vocabulary-{table}.jsonl"


def layouts(schema: Schema) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and row shape of every binary file, but for the order of rows.

    Files of ids and weights have a row for every id, the others a row for every sample.
    """
    single = [column for column in schema.features if column.kind == "categorical"]
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        LABELS: ("<f4", ()),
        DENSE: ("<f4", (len(schema.of_kind("dense")),)),
        IDS: ("<i4", (len(single),)),
    }
    for number, column in enumerate(schema.features):
        if column.kind != "categorical":
            found[bag_file(number, "ends")] = ("<i8", ())
            found[bag_file(number, "ids")] = ("<i4", ())
        if column.kind == "weighted":
            found[bag_file(number, "weights")] = ("<f4", ())
    return found


def digest_of(manifest: dict[str, Any]) -> str:
    """SHA-256 of all entries but the names of the sources: equal for equal data."""
    kept = {name: entry for name, entry in manifest.items() if name != "sources"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path) -> tuple[dict[str, Any], Schema]:
    """Return the manifest of a prepared table and the schema in the manifest.

    Checks the entries used by a reader, and the sizes of the files. Raises UsageError for a folder
    without a prepared table and for another format version, DataError for a damaged manifest and a
    file missing or of the wrong size.
    """
    path = directory / NAME
    made = f"`ecrm prepare table FILES --schema schema.toml --output {directory}` makes one"
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if directory.is_file():
            raise UsageError(
                f"{directory}: is a file, and a prepared table is a folder",
                otherwise=f"type ecrm prepare table {shlex.quote(str(directory))} "
                "--schema schema.toml --output DIR, and name DIR",
            ) from error
        there = directory.is_dir()
        why = f"is not a prepared table (it has no {NAME})" if there else "no such directory"
        raise UsageError(f"{directory}: {why}; {made}") from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    form = manifest.get("format") if isinstance(manifest, dict) else None
    if form == dataset_info.FORMAT:
        raise UsageError(f"{directory}: a dataset of `ecrm prepare criteo`, and no table; {made}")
    if form != FORMAT:
        raise DataError(f"{path}: not the manifest of a table made by `ecrm prepare table`")
    if manifest.get("format_version") != VERSION:
        raise UsageError(
            f"{directory}: format version {manifest.get('format_version')}, this program reads "
            f"{VERSION}; prepare the data again"
        )
    try:
        schema = parse_schema(manifest["schema"], str(path))
        problem = _problem(manifest, schema)
    except (EcrmError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: damaged: {error!r}") from error
    if problem:
        raise DataError(f"{path}: {problem}")
    dataset_info.check_files(directory, manifest)
    return manifest, schema


def _problem(manifest: dict[str, Any], schema: Schema) -> str:
    """The first problem in the entries used by a reader, "" without a problem."""
    rows, train_rows, tables = (manifest[key] for key in ("rows", "train_rows", "tables"))
    if not (isinstance(rows, int) and isinstance(train_rows, int) and 0 <= train_rows <= rows > 0):
        return f"rows is {rows!r}, train_rows is {train_rows!r}"
    if not isinstance(manifest["binary_labels"], bool):
        return f"binary_labels is {manifest['binary_labels']!r}"
    if list(tables) != list(schema.tables) or not all(type(n) is int for n in tables.values()):
        return "the tables are not the schema's"
    for name, (dtype, shape) in layouts(schema).items():
        record = manifest["files"][name]
        count = record["shape"][0]
        per_row = name.endswith(("-ids.bin", "-weights.bin"))
        if not per_row and count != rows:
            return f"{name} has {count} rows instead of {rows}"
        width = int(dtype[-1])
        for extent in (count, *shape):
            width *= extent
        if record["bytes"] != width:
            return f"the size of {name} does not agree with its shape"
    return ""


def values_of(path: Path) -> list[str]:
    """The values of a vocabulary file; row 1 of the table is the first value's.

    Raises UsageError for an unreadable file, DataError for a damaged file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: damaged: {error}") from error
    return found


def vocabulary_of(schema: Schema, column: Column) -> str:
    """The name of the vocabulary file of a column's table."""
    return vocabulary_file(list(schema.tables).index(column.table))

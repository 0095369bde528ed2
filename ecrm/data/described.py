"""A prepared dataset of either kind, known from its manifest. Imports no torch and no pyarrow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecrm.base.errors import DataError, UsageError
from ecrm.data import dataset_info
from ecrm.data.columns import manifest as of_tables
from ecrm.data.columns.schema import Schema
from ecrm.data.layout import COLUMN_NAMES, INTEGERS


@dataclass(frozen=True)
class Described:
    """The facts of a dataset that a run of a config needs before it starts.

    - `is_table`: the dataset is of `ecrm prepare table`, not of `ecrm prepare criteo`.
    - `rows`, and `train_rows` of them for training.
    - `tables`: the rows of every table of embeddings.
    - `features`: the table of every feature, in the order of a batch.
    - `dense`: the names of the dense columns.
    - `lookups`: the ids of a row in every table, on average.
    - `weighted`: some feature has weights. `ordered`: the rows are in the order of time.
    - `binary`: every label is 0 or 1.
    - `split`: the name of the column of kind split, empty without.
    - `files`: the manifest's record of every file.
    """

    is_table: bool
    rows: int
    train_rows: int
    tables: Mapping[str, int]
    features: Mapping[str, str]
    dense: tuple[str, ...]
    lookups: Mapping[str, float]
    weighted: bool
    ordered: bool
    binary: bool
    files: Mapping[str, Mapping[str, Any]]
    split: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all features and dense columns."""
        return (*self.features, *self.dense)

    @property
    def sums(self) -> dict[str, Any]:
        """The SHA-256 of every file, by name."""
        return {name: record.get("sha256") for name, record in self.files.items()}

    @property
    def layout(self) -> dict[str, Any]:
        """Names and vocabularies that a model depends on; empty for Criteo rows.

        Rows of two tables mean the same only if the layouts are equal.
        """
        if not self.is_table:
            return {}
        known = {name: digest for name, digest in self.sums.items() if name.startswith("vocab")}
        features = [list(pair) for pair in self.features.items()]
        return {"features": features, "dense": list(self.dense), "vocabularies": known}


def describe(path: str | Path, eval_fraction: float) -> Described:
    """Read the manifest in a folder, and check the sizes of the files.

    `eval_fraction` is the share of Criteo rows held out; a table has its own held-out rows. Raises
    UsageError for a folder without a prepared dataset, DataError for a damaged dataset.
    """
    directory = Path(path)
    if _format(directory / of_tables.NAME) == of_tables.FORMAT:
        return _of_table(directory)
    manifest = dataset_info.read_manifest(directory)
    dataset_info.check_files(directory, manifest)
    train_rows, _ = dataset_info.split_rows(manifest["rows"], eval_fraction)
    return Described(
        is_table=False,
        rows=manifest["rows"],
        train_rows=train_rows,
        tables=manifest["tables"],
        features={name: name for name in manifest["tables"]},
        dense=COLUMN_NAMES[1 : 1 + INTEGERS],
        lookups=dict.fromkeys(manifest["tables"], 1.0),
        weighted=False,
        ordered=True,
        binary=True,
        files=manifest["files"],
    )


def table_name(table: str) -> str:
    """The name of a schema's table in a model: modules of torch cannot be named `items`."""
    return f"t_{table}"


def _format(path: Path) -> object:
    """The format named in a manifest; None without a readable manifest."""
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return manifest.get("format") if isinstance(manifest, dict) else None


def _of_table(directory: Path) -> Described:
    manifest, schema = of_tables.read_manifest(directory)
    _check_names(directory, schema)
    lookups = {table_name(table): 0.0 for table in schema.tables}
    for number, column in enumerate(schema.features):
        listed = column.kind != "categorical"
        name = of_tables.bag_file(number, "ids") if listed else of_tables.LABELS
        count = manifest["files"][name]["shape"][0]
        lookups[table_name(column.table)] += count / manifest["rows"]
    if not manifest["train_rows"]:
        raise DataError(f"{directory}: every row is held out, none is for training")
    return Described(
        is_table=True,
        rows=manifest["rows"],
        train_rows=manifest["train_rows"],
        tables={table_name(table): rows for table, rows in manifest["tables"].items()},
        features={column.name: table_name(column.table) for column in schema.features},
        dense=tuple(column.name for column in schema.of_kind("dense")),
        lookups=lookups,
        weighted=bool(schema.of_kind("weighted")),
        ordered=bool(schema.of_kind("time")),
        binary=manifest["binary_labels"],
        files=manifest["files"],
        split="".join(column.name for column in schema.of_kind("split")),
    )


def _check_names(directory: Path, schema: Schema) -> None:
    """Raise UsageError for a table with a dot in its name: names of modules have none."""
    for name, column in schema.tables.items():
        if "." in name:
            raise UsageError(
                f"{directory}: the table of column {column.name!r} has a dot in its name",
                otherwise=f'type table = "{name.replace(".", "_")}" in the schema, and prepare '
                "the files again",
            )

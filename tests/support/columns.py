"""Files of columns and schemas for tests, and prepared tables read without the project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ecrm.data.columns.prepare import prepare_table
from ecrm.data.columns.schema import Schema, load_schema
from ecrm.data.columns.text_hash import text_hash

SMALL = """
held_out = 0.25
[columns]
clicked = { kind = "label" }
price = { kind = "dense" }
movie = { kind = "categorical", rows = 50 }
genres = { kind = "multi_hot", vocabulary = true, separator = "|" }
tags = { kind = "weighted", rows = 20, separator = "|" }
note = { kind = "unused" }
"""
CSV = """clicked,price,movie,genres,tags,note
1,2.5,m1,comedy|drama,new:0.5|old:2,first
0,,m2,drama,,second
1,-3,,,"new:1","a, b"
0,4,m1,horror|comedy,x:y:3,
"""


def schema_of(folder: Path, text: str = SMALL) -> Schema:
    """A schema file in a folder, loaded."""
    path = folder / "schema.toml"
    path.write_text(text)
    return load_schema(path)


def prepared_small(folder: Path, text: str = CSV, schema: str = SMALL, **options: Any) -> Path:
    """A table prepared from a text file."""
    source = folder / "rows.csv"
    source.write_text(text)
    prepare_table([str(source)], str(folder / "out"), schema_of(folder, schema), **options)
    return folder / "out"


def row_of(text: str, rows: int) -> int:
    """The documented row of a text in a hashed table."""
    return 1 + (text_hash(text.encode()) >> 32) * (rows - 1) // 2**32


def read_back(directory: Path) -> dict[str, np.ndarray]:
    """The arrays of a prepared table by file, read without the project."""
    manifest = json.loads((directory / "manifest.json").read_text())
    return {
        name: np.fromfile(directory / name, record["dtype"]).reshape(record["shape"])
        for name, record in manifest["files"].items()
        if "dtype" in record
    }

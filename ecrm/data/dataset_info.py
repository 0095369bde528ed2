"""The manifest of a prepared dataset: the content of the files, and checks of completeness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ecrm.base.errors import DataError, UsageError
from ecrm.data.layout import CATEGORIES, INTEGERS

NAME = "manifest.json"
FORMAT = "ecrm-criteo"
VERSION = 1
FILES: dict[str, tuple[str, tuple[int, ...]]] = {
    "labels.bin": ("<u1", ()),
    "dense.bin": ("<f4", (INTEGERS,)),
    "sparse.bin": ("<i4", (CATEGORIES,)),
}
"""The dtype and row shape of every binary file; rows follow without gaps."""

MALFORMED = "malformed.txt"
"""The file naming malformed lines, present if any line was malformed; no code reads the file."""

MAX_MALFORMED = 0.01
"""Default of the share of a file's lines allowed to be malformed."""
JUDGED_LINES = 100_000
"""Lines to read of a file before the file can be refused as malformed ahead of its end."""

TABLE_NAMES = tuple(f"t_cat_{i}" for i in range(CATEGORIES))


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest in a directory; check all entries used by the project.

    The sizes of the files on disk are not checked. Raises `UsageError` for a directory without a
    dataset, an unreadable manifest and a different format version, `DataError` for a damaged
    manifest.
    """
    path = directory / NAME
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        what = (
            "is not a prepared dataset (it has no manifest.json)"
            if directory.is_dir()
            else "there is no such directory"
        )
        raise UsageError(
            f"{directory}: {what}; `ecrm prepare criteo FILE --output {directory}` makes one, or "
            f"`ecrm prepare table FILES --schema schema.toml --output {directory}`"
        ) from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path}: not the manifest of a dataset made by `ecrm prepare criteo`")
    if manifest.get("format_version") != VERSION:
        raise UsageError(
            f"{directory}: format version {manifest.get('format_version')}, "
            f"this program reads {VERSION}; prepare the data again"
        )
    problem = _problem(manifest)
    if problem:
        raise DataError(f"{path}: {problem}")
    return manifest


def check_files(directory: Path, manifest: dict[str, Any]) -> None:
    """Raise `DataError` if a file is missing or differs in length from the manifest."""
    for name, record in manifest["files"].items():
        path = directory / name
        try:
            found = path.stat().st_size
        except FileNotFoundError as error:
            raise DataError(f"{path}: missing, expected {record['bytes']} bytes") from error
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from error
        if found != record["bytes"]:
            raise DataError(f"{path}: expected {record['bytes']} bytes, found {found}")


def split_rows(rows: int, eval_fraction: float) -> tuple[int, int]:
    """Return the numbers of training rows and of held-out rows (the last rows)."""
    held_out = int(rows * eval_fraction)
    return rows - held_out, held_out


def row_bytes(name: str) -> int:
    """Return the bytes of a row in a binary file."""
    dtype, shape = FILES[name]
    return int(dtype[-1]) * (shape[0] if shape else 1)


def _problem(manifest: dict[str, Any]) -> str:
    """Return the first problem in the entries used by a reader, "" without a problem."""
    rows, tables, files = (manifest.get(key) for key in ("rows", "tables", "files"))
    if not isinstance(rows, int) or rows < 1:
        return f"rows is {rows!r}, not a positive number"
    if not isinstance(tables, dict) or tuple(tables) != TABLE_NAMES:
        return f"tables are not {TABLE_NAMES[0]} to {TABLE_NAMES[-1]}"
    for name, size in tables.items():
        if not isinstance(size, int) or not 2 <= size < 2**31:
            return f"table {name} has {size!r} rows"
    if not isinstance(files, dict) or set(files) != set(FILES):
        return f"files are not {', '.join(FILES)}"
    for name, record in files.items():
        if not isinstance(record, dict) or record.get("bytes") != rows * row_bytes(name):
            return f"the size of {name} does not agree with {rows} rows"
    return ""

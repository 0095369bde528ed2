"""What a refusal says to set is set, and the config is then accepted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from ecrm.base.errors import UsageError
from ecrm.data import dataset_info as data_manifest

Accept = Callable[[Sequence[str]], None]
"""Raises UsageError unless a config with these overrides is accepted."""


DEPTH = 6
"""Refusals one after the other until a config is accepted, at most."""


def refusal(accept: Accept, overrides: Sequence[str]) -> UsageError | None:
    try:
        accept(overrides)
    except UsageError as error:
        return error
    return None


def advised(error: UsageError) -> list[list[str]]:
    """The ways out as overrides, out of the words of the message."""
    ways = [[f"{key}={typed(value)}" for key, value in way.items()] for way in error.ways_out]
    assert all(words in str(error) for way in ways for words in way), error
    return ways


def typed(value: object) -> str:
    return (
        json.dumps(list(value) if isinstance(value, tuple) else value, separators=(",", ":")).strip(
            '"'
        )
        or '""'
    )


def leads_out(accept: Accept, overrides: Sequence[str], depth: int) -> bool:
    error = refusal(accept, overrides)
    return error is None or (
        depth > 0
        and any(leads_out(accept, [*overrides, *way], depth - 1) for way in advised(error))
    )


def check_advice(accept: Accept, overrides: Sequence[str]) -> None:
    """Refused, and with each of the ways out that are offered accepted in the end."""
    error = refusal(accept, overrides)
    assert error is not None and error.ways_out, (overrides, error)
    for way in advised(error):
        assert leads_out(accept, [*overrides, *way], DEPTH), (
            overrides,
            way,
            str(error),
            str(refusal(accept, [*overrides, *way])),
        )


def dataset(folder: Path, rows: int = 1000, table_rows: int = 50, text: str = "a") -> Path:
    """A prepared dataset of nothing but zeros."""
    folder.mkdir()
    files = {}
    for name in data_manifest.FILES:
        size = rows * data_manifest.row_bytes(name)
        with open(folder / name, "wb") as file:
            file.truncate(size)
        files[name] = {"bytes": size, "sha256": text}
    tables = {name: table_rows + number for number, name in enumerate(data_manifest.TABLE_NAMES)}
    about = {
        "format": data_manifest.FORMAT,
        "format_version": data_manifest.VERSION,
        "rows": rows,
        "tables": tables,
        "files": files,
    }
    (folder / data_manifest.NAME).write_text(json.dumps(about))
    return folder

"""The folder written by a preparation: when the folder may be replaced, and durable writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ecrm.base.errors import UsageError
from ecrm.data import dataset_info


def check_replaceable(target: Path, form: str, force: bool) -> None:
    """Raise `UsageError` if `target` must not be replaced.

    `target` may be absent, an empty directory or, with `force`, a dataset of the format `form`
    without further files.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise UsageError(f"{target}: exists and is not a directory")
    entries = {entry.name for entry in target.iterdir()}
    if not entries:
        return
    known = _files(target, form)
    foreign = sorted(entries - known)
    if foreign or not known:
        raise UsageError(
            f"{target}: is not empty and not a dataset made by prepare "
            f"(it holds {min(foreign or entries)}); it is left alone"
        )
    if not force:
        raise UsageError(f"{target}: already holds a prepared dataset; --force replaces it")


def _files(directory: Path, form: str) -> set[str]:
    """The names of a dataset's files by the manifest, in any version; empty without a manifest."""
    try:
        manifest: Any = json.loads((directory / dataset_info.NAME).read_bytes())
        if manifest["format"] == form:
            return {dataset_info.NAME, dataset_info.MALFORMED, *manifest["files"]}
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return set()


def write_synced(path: Path, data: bytes) -> None:
    """Write a small file and bring it to disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

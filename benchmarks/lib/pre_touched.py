"""Pre-touched tables: data whose first samples go once through every row of every table.

A table in production has been trained for days. Checkpoints hold all of it, and rebuilding brings
all of it back. A run of some hundred steps from initial values touches a small part.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np

from ecrm.data.dataset_info import FILES, NAME, read_manifest


def pre_touch_steps(tables: dict[str, int], most_rows: int, batch: int) -> int:
    """Steps in which batches go once through the largest table, capped at `most_rows` rows."""
    return -(-min(max(tables.values()), most_rows) // batch)


def pre_touch(data: Path, folder: Path, most_rows: int, batch: int) -> int:
    """Write to `folder` the dataset in `data`, behind samples that touch every row once.

    These are samples of `data` again. Their id in each table is their own number, modulo the rows
    of the table or `most_rows` if that is less. Returns how many steps of `batch` samples they
    are. A `folder` that exists is kept as it is.
    """
    manifest = read_manifest(data)
    steps = pre_touch_steps(manifest["tables"], most_rows, batch)
    if folder.exists():
        return steps
    samples, rows = steps * batch, manifest["rows"]
    again = np.arange(samples) % rows
    aside = folder.with_name(f".{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for name, (dtype, shape) in FILES.items():
        given = np.memmap(data / name, dtype, "r", shape=(rows, *shape))
        first = given[again]
        if name == "sparse.bin":
            caps = np.minimum(np.array(list(manifest["tables"].values())), most_rows)
            first = (np.arange(samples)[:, None] % caps).astype(dtype)
        content = first.tobytes() + given.tobytes()
        (aside / name).write_bytes(content)
        manifest["files"][name] = {
            **manifest["files"][name],
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    manifest["rows"] = rows + samples
    (aside / NAME).write_text(json.dumps(manifest))
    aside.rename(folder)
    return steps

"""`ecrm export`: the model of a checkpoint as one file, under the names of its state_dict."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ecrm.base.version_set import name_of
from ecrm.checkpoint.compatibility import VERSIONS, begun_as
from ecrm.checkpoint.folder import Checkpoint

if TYPE_CHECKING:
    import numpy as np

    from ecrm.placement.tables import RowSpace

FORMATS = ("safetensors", "torchrec")


def export(checkpoint: Checkpoint, form: str, output: BinaryIO, folder: Path) -> tuple[int, int]:
    """Write a checkpoint's model to the empty file `output`; returns (tensors, their bytes).

    `folder` may get a temporary file. Memory is bounded: records come in windows, and the system
    holds the pages of the file. Raises DataError if a file of the checkpoint is damaged, UsageError
    if the checkpoint alone does not tell the values of its rows, OSError without space.
    """
    import numpy as np

    from ecrm.checkpoint.exported_model import exported_model
    from ecrm.checkpoint.model_file import ModelFile
    from ecrm.checkpoint.restore import read_dense
    from ecrm.placement.tables import row_spaces

    model = exported_model(checkpoint.manifest.identity)
    for link in checkpoint.chain:
        for entry in link.manifest.files:
            link.check(entry)
    dense = model.dense_of(read_dense(checkpoint))
    shapes = {
        name: (np.dtype(np.float32), (table.rows, table.dim))
        for table in model.tables
        for name in model.names[table.name]
    }
    shapes |= {name: (array.dtype, array.shape) for name, array in dense.items()}
    about = {"step": str(checkpoint.step)}
    if VERSIONS in checkpoint.manifest.identity:
        about["version_set"] = name_of(checkpoint.manifest.identity[VERSIONS])
    with closing(ModelFile(form, output, folder, shapes, about)) as file:
        for number, space in enumerate(row_spaces(model.tables)):
            tables = [file.arrays[model.names[table.name][0]] for table in space.tables]
            _fill(checkpoint, number, space, tables)
        for first, *others in model.names.values():
            for name in others:
                file.arrays[name][...] = file.arrays[first]
        for name, array in dense.items():
            file.arrays[name][...] = array
        file.finish()
        return len(shapes), file.bytes


def _fill(checkpoint: Checkpoint, number: int, space: RowSpace, tables: list[np.ndarray]) -> None:
    """Write the rows of a space: first the initial values, then the values in the checkpoint."""
    import numpy as np
    import torch

    from ecrm.checkpoint.row_file import FRAME_ROWS, read_rows
    from ecrm.storage.initial_rows import InitialRows

    offsets = np.array(space.offsets)
    initial = InitialRows(space, begun_as(checkpoint.manifest.identity)["rows_seed"])
    for first in range(0, space.rows, FRAME_ROWS):
        rows = torch.arange(first, min(first + FRAME_ROWS, space.rows))
        _scatter(tables, offsets, rows.numpy(), initial(rows).numpy())
    for link in checkpoint.chain:
        for entry in link.manifest.row_files:
            if entry["space"] != number:
                continue
            size = link.manifest.record_bytes[number]
            for numbers, records in read_rows(link.path / entry["name"], size, space.rows):
                values = np.ascontiguousarray(records[:, : 4 * space.dim]).view(np.float32)
                _scatter(tables, offsets, numbers, values)


def _scatter(
    tables: list[np.ndarray], offsets: np.ndarray, numbers: np.ndarray, values: np.ndarray
) -> None:
    """Write values, float32 [R, D], of row numbers of a space, int64 [R], into its tables."""
    import numpy as np

    homes = np.searchsorted(offsets, numbers, side="right") - 1
    for table in np.unique(homes):
        here = homes == table
        tables[table][numbers[here] - offsets[table]] = values[here]

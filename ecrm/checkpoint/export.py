"""`ecrm export`: the model of a checkpoint as one file, under the names of TorchRec's DLRM."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ecrm.checkpoint.compatibility import begun_as
from ecrm.checkpoint.folder import Checkpoint

if TYPE_CHECKING:
    import numpy as np

    from ecrm.placement.tables import RowSpace

FORMATS = ("safetensors", "torchrec")
TABLE = "sparse_arch.embedding_bag_collection.embedding_bags.{}.weight"


def export(checkpoint: Checkpoint, form: str, output: BinaryIO, folder: Path) -> tuple[int, int]:
    """Write a checkpoint's model to an empty file in `folder`; returns (tensors, their bytes).

    Memory is bounded: records come in windows, and the pages of the file are the system's. Raises
    DataError where a file of the checkpoint is damaged, OSError where there is no space.
    """
    for link in checkpoint.chain:
        for entry in link.manifest.files:
            link.check(entry)
    return _write(checkpoint, form, output, folder)


def shapes_of(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Every tensor's name in TorchRec's DLRM and its shape.

    Tables come first, then the dense parts in the order of their flat buffer.
    """
    identity = checkpoint.manifest.identity
    bottom, top, tables = (
        identity["model.bottom_mlp"],
        identity["model.top_mlp"],
        identity["tables"],
    )
    shapes: dict[str, tuple[int, ...]] = {
        TABLE.format(name): (rows, identity["model.embedding_dim"]) for name, rows in tables.items()
    }
    features = len(tables)
    shapes |= _layers("dense_arch.model._mlp.{}._linear", 13, bottom)
    width = bottom[-1] + (features + 1) * features // 2
    shapes |= _layers("over_arch.model.0._mlp.{}._linear", width, top[:-1])
    last = top[-2] if len(top) > 1 else width
    return {
        **shapes,
        "over_arch.model.1.weight": (top[-1], last),
        "over_arch.model.1.bias": (top[-1],),
    }


def _layers(name: str, inputs: int, widths: list[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for number, width in enumerate(widths):
        yield f"{name.format(number)}.weight", (width, inputs)
        yield f"{name.format(number)}.bias", (width,)
        inputs = width


def _write(checkpoint: Checkpoint, form: str, output: BinaryIO, folder: Path) -> tuple[int, int]:
    """Fill a model file with the rows and the dense parts of a checkpoint."""
    import numpy as np
    import torch

    from ecrm.checkpoint.model_file import ModelFile
    from ecrm.checkpoint.restore import read_dense
    from ecrm.checkpoint.row_file import FRAME_ROWS, read_rows
    from ecrm.placement.tables import Table, row_spaces
    from ecrm.storage.initial_rows import InitialRows

    shapes = shapes_of(checkpoint)
    kinds = {name: (np.dtype(np.float32), shape) for name, shape in shapes.items()}
    identity = checkpoint.manifest.identity
    dim = identity["model.embedding_dim"]
    (space,) = row_spaces([Table(name, rows, dim) for name, rows in identity["tables"].items()])
    offsets, initial = np.array(space.offsets), InitialRows(space, begun_as(identity)["rows_seed"])
    with closing(ModelFile(form, output, folder, kinds, {"step": str(checkpoint.step)})) as model:
        arrays = model.arrays
        for first in range(0, space.rows, FRAME_ROWS):
            rows = torch.arange(first, min(first + FRAME_ROWS, space.rows))
            _scatter(arrays, space, offsets, rows.numpy(), initial(rows).numpy())
        for link in checkpoint.chain:
            for entry in link.manifest.row_files:
                for numbers, records in read_rows(
                    link.path / entry["name"], link.manifest.record_bytes[0], space.rows
                ):
                    _scatter(
                        arrays,
                        space,
                        offsets,
                        numbers,
                        np.ascontiguousarray(records[:, : 4 * dim]).view(np.float32),
                    )
        flat, place = read_dense(checkpoint)[0].numpy(), 0
        for name, shape in shapes.items():
            if not name.startswith("sparse_arch."):
                arrays[name][...] = flat[place : place + math.prod(shape)].reshape(shape)
                place += math.prod(shape)
        model.finish()
        return len(shapes), model.bytes


def _scatter(
    arrays: Mapping[str, np.ndarray],
    space: RowSpace,
    offsets: np.ndarray,
    numbers: np.ndarray,
    values: np.ndarray,
) -> None:
    """Write values, float32 [R, D], of row numbers of the space, int64 [R], into their tables."""
    import numpy as np

    tables = np.searchsorted(offsets, numbers, side="right") - 1
    for table in np.unique(tables):
        here = tables == table
        arrays[TABLE.format(space.tables[table].name)][numbers[here] - offsets[table]] = values[
            here
        ]

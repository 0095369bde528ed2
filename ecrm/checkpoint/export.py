"""`ecrm export`: the model of a checkpoint as one file, under the names of TorchRec's DLRM."""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

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
    if form == "safetensors":
        return _write(checkpoint, output)
    import torch

    # without a name: nothing is left of it, however this ends
    with tempfile.TemporaryFile(dir=folder) as plain:
        written = _write(checkpoint, plain)
        saved = _Saved(output)
        torch.save(
            {name: torch.from_numpy(array) for name, array in read_safetensors(plain).items()},
            cast(BinaryIO, saved),
        )
    if saved.trouble is not None:
        raise saved.trouble
    return written


class _Saved:
    """A file for torch.save, whose own errors do not say why a write failed.

    `trouble` is the error of the first write that failed, None if none did.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.trouble: OSError | None = None

    def write(self, data: bytes) -> int:
        if self.trouble is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.trouble = error
        return len(data)

    def flush(self) -> None:
        """All is flushed when the file is complete."""


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


def _write(checkpoint: Checkpoint, output: BinaryIO) -> tuple[int, int]:
    """Write the model as a safetensors file to `output`, which is empty before.

    The file holds the size of its header, the header with names, shapes and offsets in JSON, and
    the tensors.
    """
    import numpy as np
    import torch

    from ecrm.checkpoint.restore import read_dense
    from ecrm.checkpoint.row_file import FRAME_ROWS, read_rows
    from ecrm.placement.tables import Table, row_spaces
    from ecrm.storage.initial_rows import InitialRows

    shapes, entries, at = shapes_of(checkpoint), {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    header = json.dumps({"__metadata__": {"step": str(checkpoint.step)}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    output.write(struct.pack("<Q", len(header)) + header)
    output.flush()
    # a mapped page that finds no room on the disk kills with SIGBUS
    os.posix_fallocate(output.fileno(), 0, output.tell() + at)
    arrays = read_safetensors(output, "r+")
    identity = checkpoint.manifest.identity
    dim = identity["model.embedding_dim"]
    (space,) = row_spaces([Table(name, rows, dim) for name, rows in identity["tables"].items()])
    offsets, initial = np.array(space.offsets), InitialRows(space, begun_as(identity)["rows_seed"])
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
    for array in arrays.values():
        array.flush()
    return len(shapes), at


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


def read_safetensors(
    source: Path | BinaryIO, mode: Literal["c", "r+"] = "c"
) -> dict[str, np.memmap[Any, Any]]:
    """The tensors of a safetensors file of float32, mapped: {name: array}.

    Changes stay in memory unless `mode` is r+.
    """
    import numpy as np

    with open(source, "rb") if isinstance(source, Path) else nullcontext(source) as file:
        (size,) = struct.unpack("<Q", os.pread(file.fileno(), 8, 0))
        entries = json.loads(os.pread(file.fileno(), size, 8))
        entries.pop("__metadata__", None)
        return {
            name: np.memmap(
                file, np.float32, mode, 8 + size + entry["data_offsets"][0], tuple(entry["shape"])
            )
            for name, entry in entries.items()
        }

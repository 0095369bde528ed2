"""A file of named tensors, filled piece by piece in bounded memory."""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

import numpy as np
import xxhash

from ecrm.checkpoint.checksums import CHECKSUMS

if TYPE_CHECKING:
    from torch import Tensor

_NAMES: dict[str, type] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "BF16": np.uint16,  # numpy has no bfloat16
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
}
_TYPES = {np.dtype(kind): name for name, kind in _NAMES.items()}

Shape = tuple[np.dtype[Any], tuple[int, ...]]
"""Element type and sizes of a tensor."""


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor as an array for `ModelFile`: bfloat16 as uint16."""
    import torch

    plain = tensor.detach()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(np.uint16)
    return plain.numpy()


class ModelFile:
    """A file being written: `arrays` are its tensors, mapped, and zero until filled.

    An array of uint16 is a tensor of bfloat16.

    `form` is `safetensors`, or `torchrec` for a file read by torch.load. `output` is an empty file,
    `folder` is for a temporary file. `bytes` is the size of all tensors. Raises OSError without
    space on the disk.
    """

    def __init__(
        self,
        form: str,
        output: BinaryIO,
        folder: Path,
        shapes: Mapping[str, Shape],
        about: Mapping[str, str],
    ) -> None:
        self._output = output
        # without a name: no file is left behind in any case
        self._plain = (
            output if form == "safetensors" else cast(BinaryIO, tempfile.TemporaryFile(dir=folder))
        )
        try:
            self._shapes = shapes
            self._about = about if form != "safetensors" else {**about, **_no_checksums(shapes)}
            self.bytes = _begin(self._plain, shapes, self._about)
            self.arrays = read_safetensors(self._plain, "r+")
        except BaseException:
            self.close()
            raise

    def finish(self) -> None:
        """Bring the file into its format; raises OSError without space on the disk."""
        for array in self.arrays.values():
            if isinstance(array, np.memmap):
                array.flush()
        if self._plain is self._output:
            found = {
                name: xxhash.xxh3_64_hexdigest(array.reshape(-1).view(np.uint8).data)
                for name, array in self.arrays.items()
            }
            header, _ = _header(self._shapes, {**self._about, CHECKSUMS: json.dumps(found)})
            os.pwrite(self._output.fileno(), header, 0)
            return
        import torch

        saved = _Saved(self._output)
        torch.save(
            {
                name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
                if array.dtype == np.uint16
                else torch.from_numpy(array)
                for name, array in self.arrays.items()
            },
            cast(BinaryIO, saved),
        )
        if saved.trouble is not None:
            raise saved.trouble

    def close(self) -> None:
        """Give up the temporary file."""
        if self._plain is not self._output:
            self._plain.close()


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
        """Does nothing: all data is flushed when the file is complete."""


def _no_checksums(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Room in the header for checksums, known only once all tensors are written."""
    return {CHECKSUMS: json.dumps(dict.fromkeys(shapes, "0" * 16))}


def _begin(output: BinaryIO, shapes: Mapping[str, Shape], about: Mapping[str, str]) -> int:
    """Write the head of a safetensors file and make room for its tensors; returns their bytes."""
    header, size = _header(shapes, about)
    output.write(header)
    output.flush()
    # a mapped page without room on the disk kills the process with SIGBUS
    os.posix_fallocate(output.fileno(), 0, output.tell() + size)
    return size


def _header(shapes: Mapping[str, Shape], about: Mapping[str, str]) -> tuple[bytes, int]:
    """The head of a safetensors file, and the bytes of its tensors.

    The file holds the size of its header, the header with names, shapes and offsets in JSON, and
    the tensors.
    """
    entries, at = {}, 0
    for name, (kind, shape) in shapes.items():
        size = kind.itemsize * math.prod(shape)
        entries[name] = {
            "dtype": _TYPES[kind],
            "shape": list(shape),
            "data_offsets": [at, at + size],
        }
        at += size
    header = json.dumps({"__metadata__": dict(about), **entries}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header, at


def read_safetensors(
    source: Path | BinaryIO, mode: Literal["c", "r+"] = "c"
) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a safetensors file, mapped: {name: array}.

    Changes stay in memory unless `mode` is r+.
    """
    with open(source, "rb") if isinstance(source, Path) else nullcontext(source) as file:
        return {
            name: _mapped(file, mode, offset, entry)
            for name, (offset, entry) in safetensors_entries(file).items()
        }


def safetensors_entries(file: BinaryIO) -> dict[str, tuple[int, dict[str, Any]]]:
    """{name: (position of its data in the file, its header entry)} of a safetensors file.

    Raises ValueError if the header is missing, cut short or not JSON.
    """
    head = os.pread(file.fileno(), 8, 0)
    if len(head) < 8:
        raise ValueError("it has no header")
    (size,) = struct.unpack("<Q", head)
    if size > os.fstat(file.fileno()).st_size:
        raise ValueError("its header is cut short")
    entries = json.loads(os.pread(file.fileno(), size, 8))
    entries.pop("__metadata__", None)
    return {name: (8 + size + entry["data_offsets"][0], entry) for name, entry in entries.items()}


def _mapped(
    file: BinaryIO, mode: Literal["c", "r+"], offset: int, entry: Mapping[str, Any]
) -> np.ndarray[Any, Any]:
    kind, shape = _NAMES[entry["dtype"]], tuple(entry["shape"])
    if not math.prod(shape):
        return np.empty(shape, kind)  # an empty tensor cannot be mapped
    return np.memmap(file, kind, mode, offset, shape)

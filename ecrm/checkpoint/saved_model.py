"""A file with a model's tensors, saved by any program: mapped, and read page by page on use."""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from ecrm.base.errors import DataError, EcrmError, UsageError
from ecrm.base.opened_file import OpenedFile
from ecrm.checkpoint.model_file import safetensors_entries

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
SAVE = "save it with torch.save(model.state_dict(), path), session.save(path) or safetensors"


def read_model(path: Path) -> dict[str, Any]:
    """The state_dict of `open_model` alone."""
    return open_model(path)[0]


def open_model(path: Path) -> tuple[dict[str, Any], OpenedFile]:
    """The state_dict in a file of torch.save or safetensors; its tensors are mapped.

    Names of the same tensor in a file of torch.save share memory. Nothing is held in memory: the
    system reads pages of the file on use. A write into a tensor stays in the memory of the process.
    Values other than tensors are as saved. The bytes of tensors are not checked.

    Returns the open file, too: later reads of a tensor are right if the file has not changed by
    then.

    Raises UsageError if the file is missing or holds something else, DataError if the file is cut
    short.
    """
    if path.is_dir():
        raise UsageError(_of_folder(path))
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file")
    try:
        with path.open("rb") as file:
            opened = OpenedFile(path, file)
            is_torch = zipfile.is_zipfile(file)
            file.seek(0)
            found = _of_torch(path, file) if is_torch else _of_safetensors(path, file)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except EcrmError:
        raise
    except Exception as error:  # torch's errors for damaged files have no common class
        first = str(error).strip().partition("\n")[0]
        raise DataError(f"{path} cannot be read, it is damaged: {first}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds a {type(found).__name__}, no state_dict", otherwise=SAVE)
    _check_that_it_is_flat(path, found)
    return found, opened


def _of_folder(path: Path) -> str:
    """The message for a folder given in place of a file, with the command to type instead."""
    if (path / ".metadata").exists():
        return (
            f"{path} is a folder of torch.distributed.checkpoint: call dcp_to_torch_save("
            f"{str(path)!r}, 'model.pt') of torch.distributed.checkpoint.format_utils, and load "
            "that file"
        )
    if (path / "checkpoints").is_dir() or (path / "manifest.json").exists():
        return (
            f"{path} holds checkpoints of ecrm: type ecrm export {path} --output "
            "model.safetensors, and load that file"
        )
    return f"{path} is a folder; give the file in it that holds the model"


def _check_that_it_is_flat(path: Path, found: Mapping[Any, Any]) -> None:
    """Raise UsageError if the state_dict holds a further dict with tensors."""
    for name, inner in found.items():
        if str(name).endswith("_extra_state") or not isinstance(inner, Mapping):
            continue
        if any(isinstance(value, Tensor) for value in inner.values()):
            raise UsageError(
                f"{path} holds a state_dict in another dict, as {name!r}: "
                f"give the inner dict, torch.save(torch.load(path)[{name!r}], other_path)"
            )


def _of_safetensors(path: Path, file: BinaryIO) -> dict[str, Any]:
    try:
        entries = safetensors_entries(file)
    except (ValueError, AttributeError, KeyError, TypeError):
        raise UsageError(
            f"{path} is no file of torch.save or safetensors, or is cut short", otherwise=SAVE
        ) from None
    found = {}
    for name, (offset, entry) in entries.items():
        dtype: Any = entry.get("dtype")
        shape: Any = entry.get("shape")
        ends: Any = entry.get("data_offsets")
        kind = _DTYPES.get(str(dtype))
        if kind is None:
            raise UsageError(f"{path}: {name} is {dtype}, which torch does not have")
        if not (_are_sizes(shape) and _are_sizes(ends) and len(ends) == 2):
            raise DataError(f"{path}: {name} has shape {shape} and lies at {ends} in the header")
        size = math.prod(shape) * kind.itemsize
        if ends[1] - ends[0] != size:
            raise DataError(
                f"{path}: {name} has shape {shape} and dtype {dtype} in the header, "
                f"{size:,} bytes, but {ends[1] - ends[0]:,} bytes of data"
            )
        found[name] = _mapped(path, file, offset, size, kind).view(shape)
    return found


def _mapped(path: Path, file: BinaryIO, offset: int, size: int, kind: torch.dtype) -> Tensor:
    """`size` bytes of a file as elements, [n]. Raises DataError if the file ends too early."""
    if not size:
        return torch.empty(0, dtype=kind)
    try:
        data = np.memmap(file, np.uint8, "c", offset, (size,))
    except ValueError:
        raise DataError(f"{path} is cut short") from None
    return torch.from_numpy(data).view(kind)


def _are_sizes(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(n, int) and n >= 0 for n in given)


def _of_torch(path: Path, file: BinaryIO) -> Any:
    try:
        # the open file, even after a rename to its path
        return torch.load(
            f"/proc/self/fd/{file.fileno()}", map_location="cpu", weights_only=True, mmap=True
        )
    except pickle.UnpicklingError as error:
        first = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"{path} holds more than tensors and numbers ({first})", otherwise=SAVE
        ) from None
    except (RuntimeError, json.JSONDecodeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise DataError(f"{path} cannot be read: {first}") from None

"""A file with a model's tensors, as others have saved it: mapped, and read when it is looked at."""

from __future__ import annotations

import json
import math
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ecrm.checkpoint.model_file import safetensors_entries
from ecrm.errors import DataError, UsageError

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
    """The state_dict in a file of torch.save or safetensors; its tensors are mapped read-only.

    Nothing is held in memory: the system reads pages of the file when they are looked at. Writing
    into such a tensor ends the process (not checked). What is no tensor is as it was saved. The
    bytes of tensors are not checked.

    Raises UsageError where there is no such file or it holds something else, DataError where it is
    cut short.
    """
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file")
    try:
        found = _of_torch(path) if zipfile.is_zipfile(path) else _of_safetensors(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds a {type(found).__name__}, no state_dict", otherwise=SAVE)
    return found


def _of_safetensors(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            entries = safetensors_entries(file)
    except (ValueError, AttributeError, KeyError, TypeError):
        raise UsageError(
            f"{path} is no file of torch.save or safetensors, or is cut short", otherwise=SAVE
        ) from None
    found = {}
    for name, (offset, entry) in entries.items():
        if entry["dtype"] not in _DTYPES:
            raise UsageError(f"{path}: {name} is {entry['dtype']}, which torch does not have")
        kind, shape = _DTYPES[entry["dtype"]], entry["shape"]
        flat = _mapped(path, offset, math.prod(shape) * kind.itemsize, kind)
        found[name] = flat.view(shape)
    return found


def _of_torch(path: Path) -> Any:
    try:
        with FakeTensorMode():  # tensors without memory, which know where theirs begins
            said = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"{path} holds more than tensors and numbers ({first})", otherwise=SAVE
        ) from None
    except (RuntimeError, json.JSONDecodeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise DataError(f"{path} cannot be read: {first}") from None
    if not isinstance(said, dict):
        return said
    return {
        name: _placed(path, value) if isinstance(value, Tensor) else value
        for name, value in said.items()
    }


def _placed(path: Path, fake: Tensor) -> Tensor:
    """The tensor that a fake one stands for."""
    if fake.layout != torch.strided or fake.is_meta:
        return fake
    storage = fake.untyped_storage()
    count = storage.nbytes() // fake.dtype.itemsize
    offset = storage._checkpoint_offset
    assert offset is not None, "torch.load says it of fake tensors"
    flat = _mapped(path, offset, count * fake.dtype.itemsize, fake.dtype)
    return flat.as_strided(fake.shape, fake.stride(), fake.storage_offset())


def _mapped(path: Path, offset: int, size: int, kind: torch.dtype) -> Tensor:
    """Elements of a file, [n]."""
    if not size:
        return torch.empty(0, dtype=kind)
    try:
        data = np.memmap(path, np.uint8, "r", offset, (size,))
    except ValueError:
        raise DataError(f"{path} is cut short") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written
        return torch.from_numpy(data).view(kind)

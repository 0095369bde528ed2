"""A digest of all parts of a user's batch, the same in every process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import xxhash
from tensordict import TensorDict
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from ecrm.device.copies import on_host
from ecrm.transport.digests import array_digest, plain, tensor_digest, words_digest

_DEEPEST = 4
"""How many levels of containers the digest covers."""
_LONGEST = 10_000
"""Most values of a list in the digest; of a longer list only the length and the first values."""


def batch_digest(batch: object, known: Mapping[int, int] = MappingProxyType({})) -> int:
    """Return the digest, 63 bits, of tensors, arrays, numbers and words in a batch, in order.

    Looks into jagged tensors, TensorDicts, lists, tuples, dicts and objects with attributes. Of
    remaining objects only the class counts. `known` are digests of tensors by `id(tensor)`.
    """
    digests = np.fromiter(_digests(batch, _DEEPEST, known), np.uint64)
    return xxhash.xxh3_64_intdigest(digests.data) >> 1


def _digests(value: object, levels: int, known: Mapping[int, int]) -> Iterator[int]:
    if id(value) in known:
        yield known[id(value)]
    elif isinstance(value, Tensor):
        if value.layout == torch.strided and not value.is_meta:
            yield tensor_digest(on_host(value.detach())[0])
    elif isinstance(value, np.ndarray):
        yield words_digest(f"{value.dtype} {value.shape}")
        if value.dtype.kind in "biufcSU":
            yield array_digest(value)
    elif isinstance(value, str | bytes | bool | int | float | complex | np.generic | None):
        yield words_digest(plain(value.item() if isinstance(value, np.generic) else value))
    else:
        yield words_digest(type(value).__qualname__)
        for part in _parts(value) if levels else ():
            yield from _digests(part, levels - 1, known)


def _parts(value: Any) -> Iterable[object]:
    """The contents of a container, in the same order in every process."""
    if isinstance(value, KeyedJaggedTensor):
        return [value.keys(), value.values(), value.lengths(), value.weights_or_none()]
    if isinstance(value, JaggedTensor):
        return [value.values(), value.lengths(), value.weights_or_none()]
    if isinstance(value, KeyedTensor):
        return [value.keys(), value.values()]
    if isinstance(value, TensorDict | Mapping):
        return [part for key, each in value.items() for part in (str(key), each)]
    if isinstance(value, list | tuple):
        return [len(value), *value[:_LONGEST]]
    if isinstance(value, nn.Module | type):
        return []
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return (
        [part for name, each in vars(value).items() for part in (name, each)]
        if hasattr(value, "__dict__")
        else []
    )

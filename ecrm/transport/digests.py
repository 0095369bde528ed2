"""Digests of 64 bits: of tensors, of named state, and of the content of batches."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache

import numpy as np
import torch
import xxhash
from torch import Tensor

from ecrm.device.copies import on_host

_BITS = (1 << 64) - 1
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, Enum)
"""Types whose `repr` gives the value, equal in every process."""


def words_digest(text: str) -> int:
    """The digest of a text."""
    return xxhash.xxh3_64_intdigest(text.encode())


def tensor_digest(tensor: Tensor, name: str = "") -> int:
    """The digest of a CPU tensor's name, dtype, shape and elements.

    Strides and addresses do not count.
    """
    head = f"{name} {tensor.dtype} {list(tensor.shape)}"
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return xxhash.xxh3_64_intdigest(content, seed=words_digest(head))


def digest_at(address: int, count: int) -> int:
    """The `tensor_digest` of `count` int64 numbers at an address; the caller keeps the memory."""
    return xxhash.xxh3_64_intdigest(ctypes.string_at(address, 8 * count), seed=_seed(count))


@lru_cache(1 << 16)
def _seed(count: int) -> int:
    return words_digest(f" {torch.int64} [{count}]")


def array_digest(array: np.ndarray) -> int:
    """The digest of the elements of a numpy array without objects."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(array).tobytes())


def entry_digests(entries: Iterable[tuple[str, object]]) -> dict[str, int]:
    """Return a digest of 64 bits per entry, by name.

    A tensor counts by dtype, shape and elements, not by strides, device or address. A numpy array
    without objects counts in the same way. Other values count by the text from `plain`.
    """
    named = list(entries)
    on_cpu = iter(on_host(*(value.detach() for _, value in named if isinstance(value, Tensor))))
    digests = {}
    for name, value in named:
        if isinstance(value, Tensor):
            digests[name] = tensor_digest(next(on_cpu), name)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            digests[name] = words_digest(
                f"{name} {value.dtype} {value.shape} {array_digest(value)}"
            )
        elif isinstance(value, set | frozenset):
            digests[name] = words_digest(f"{name} {sorted(map(plain, value))}")
        else:
            digests[name] = words_digest(f"{name} {plain(value)}")
    return digests


def digest_of(digests: Mapping[str, int]) -> int:
    """The digest, 64 bits, of all entries in any order."""
    return sum(digests.values()) & _BITS


def plain(value: object) -> str:
    """Return the same text for a value in every process; for an object, the class name alone."""
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    return type(value).__qualname__

"""State that no commit has, such as a counter on a module: found by a walk, and compared.

A failure undoes steps, and gives the dense part to other ranks. Both know parameters, buffers,
optimizers' `state` and groups, the scheduler, and what was registered. Anything else that training
changes would be lost without a word.
"""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from ecrm.transport.digests import tensor_digest, words_digest
from ecrm.transport.gpu_copies import on_host

Seen = dict[str, object]
"""Values by the path that leads to them; of tensors and generators, a digest."""

_DEEPEST = 6
_MOST = 20_000
"""Values that a walk visits at most."""
_TORCHS = frozenset(
    {"_parameters", "_buffers", "_modules", "training", "_non_persistent_buffers_set"}
)
"""Attributes of modules that are seen otherwise, or put back around a slot."""
_NEVER = (type, types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device)


def of_module(module: nn.Module) -> Seen:
    """The attributes of a module and its submodules that are no parameters and no buffers."""
    seen: Seen = {}
    walk = _Walk(())
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _TORCHS and "_hooks" not in name:
                seen.update(walk.of(f"{path}.{name}" if path else name, value, _DEEPEST))
    return seen


def of_objects(named: Mapping[str, object], known: Set[int]) -> Seen:
    """What is reached from objects by their attributes, and from functions by what they use.

    Objects whose id is `known` are left out: their state is seen otherwise.
    """
    seen: Seen = {}
    walk = _Walk(known)
    for name, value in named.items():
        seen.update(walk.of(name, value, _DEEPEST))
    return seen


def first_change(before: Seen, after: Seen) -> str:
    """The first value that differs, in words; "" where none does.

    A list that has only grown is no change: such lists are logs.
    """
    for path, value in after.items():
        if path in before and before[path] != value:
            numbers = isinstance(value, bool | int | float | str)
            return f"{path}, {before[path]!r} before and {value!r} now" if numbers else path
    return ""


class _Walk:
    def __init__(self, known: Set[int] | Sequence[int]) -> None:
        self._visited = set(known)
        self._left = _MOST

    def of(self, path: str, value: Any, levels: int) -> Iterator[tuple[str, object]]:
        """(path, value) of everything below a value."""
        self._left -= 1
        if self._left < 0:
            return
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            yield path, value
            return
        if isinstance(value, np.generic):
            yield path, value.item()
            return
        if isinstance(value, _NEVER) or id(value) in self._visited or not levels:
            return
        self._visited.add(id(value))
        digest = _digest(value)
        if digest is not None:
            yield path, digest
            return
        for name, part in _parts(value):
            yield from self.of(f"{path}{name}", part, levels - 1)


def _digest(value: Any) -> str | None:
    """What a tensor, an array or a generator holds; None for anything else."""
    if isinstance(value, Tensor):
        if value.is_meta or value.layout != torch.strided:
            return ""
        return f"tensor {tensor_digest(on_host(value.detach())[0]):016x}"
    if isinstance(value, np.ndarray):
        plain = value.dtype.kind in "biufcSU"
        return f"array {xxhash.xxh3_64_hexdigest(value.tobytes())}" if plain else ""
    if isinstance(value, torch.Generator):
        return f"generator {tensor_digest(value.get_state()):016x}"
    if isinstance(value, random.Random):
        return f"generator {words_digest(repr(value.getstate())):016x}"
    if isinstance(value, np.random.Generator | np.random.RandomState):
        if isinstance(value, np.random.Generator):
            return f"generator {words_digest(repr(value.bit_generator.state)):016x}"
        kind, keys, *rest = value.get_state(legacy=True)
        return f"generator {words_digest(repr((kind, np.asarray(keys).tobytes(), rest))):016x}"
    return None


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What a container, an object or a function refers to, with what its path goes on with."""
    if isinstance(value, Mapping):
        return [(f"[{_key(key, at)}]", each) for at, (key, each) in enumerate(value.items())]
    if isinstance(value, list | tuple | deque):
        return [(f"[{number}]", each) for number, each in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [("", repr(sorted(map(repr, value))))]
    if isinstance(value, types.MethodType):
        return [("", value.__func__), (".__self__", value.__self__)]
    if isinstance(value, types.FunctionType):
        return _used_by(value)
    if type(value).__module__.partition(".")[0] in ("ecrm", "torchrec"):
        return []
    if isinstance(value, nn.Module):
        return []
    attributes = dict(getattr(value, "__dict__", {}))
    for slot in getattr(type(value), "__slots__", ()) if not attributes else ():
        if hasattr(value, slot):
            attributes[slot] = getattr(value, slot)
    torchs = type(value).__module__.partition(".")[0] == "torch" or isinstance(value, Optimizer)
    return [
        (f".{name}", each)
        for name, each in attributes.items()
        if not (torchs and name.startswith("_")) and "_hooks" not in name
    ]


def _key(key: object, at: int) -> str:
    """A key of a dict in words; of a parameter, which is one for optimizers, its number."""
    return repr(key) if isinstance(key, str | int | float) else f"{type(key).__name__} {at}"


def _used_by(function: types.FunctionType) -> list[tuple[str, Any]]:
    """What a function refers to: variables around it, defaults, and globals that are data."""
    found: list[tuple[str, Any]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            found.append((f" {name}", cell.cell_contents))
        except ValueError:  # not bound yet
            continue
    for name, default in (function.__kwdefaults__ or {}).items():
        found.append((f" {name}", default))
    for number, default in enumerate(function.__defaults__ or ()):
        found.append((f" default {number}", default))
    names = _names_of(function.__code__)
    found += [(f" {n}", function.__globals__[n]) for n in names if n in function.__globals__]
    return found


def _names_of(code: types.CodeType) -> list[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return [*code.co_names, *(name for each in inner for name in _names_of(each))]

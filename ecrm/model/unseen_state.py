"""State in no commit, such as a counter on a module: found by a walk, and compared.

A failure undoes steps, and gives the dense part to other ranks. Both cover parameters, buffers,
optimizers' `state` and groups, the scheduler, and registered objects. All further state changed by
training would be lost silently.
"""

from __future__ import annotations

import functools
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from ecrm.device.copies import on_host
from ecrm.transport.digests import tensor_digest, words_digest

Seen = dict[str, object]
"""Values by path; for tensors and generators, a digest."""

_DEEPEST = 6
_MOST = 20_000
"""Most values visited by a walk; a longer walk ends and reports CUT."""
_LONG = 200
"""A container with more plain values counts as a single value."""
CUT = "more values than are compared"
_MODES = "training"
_TORCHS = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", _MODES})
"""Attributes of modules compared elsewhere."""
_OPTIMIZERS = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)))
"""Attributes given to each optimizer by torch's own class."""
_NEVER = (type, types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True)
class Length:
    """The length of a list, which may be a log."""

    count: int


def of_module(module: nn.Module) -> Seen:
    """The values of a module and its submodules besides parameters and buffers.

    Covered are attributes, and plain data of the user's classes. Modes are left out.
    """
    return _of_parts(module, _attributes)


def numbers_of(module: nn.Module) -> dict[str, object]:
    """The numbers and words among the attributes of a module and its submodules."""
    return {
        f"{path}.{name}" if path else name: value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, bool | int | float | str) and name not in _TORCHS
    }


def used_by(module: nn.Module) -> Seen:
    """Values used by the `forward` and hooks of a module and its submodules, such as globals."""
    return _of_parts(module, _functions)


def _of_parts(
    module: nn.Module, of_part: Callable[[nn.Module], Iterator[tuple[str, object]]]
) -> Seen:
    seen: Seen = {}
    walk = _Walk(state_of(module))
    for path, part in module.named_modules():
        for name, value in of_part(part):
            seen.update(walk.of(f"{path}.{name}" if path else name, value, _DEEPEST))
    return seen | walk.cut


def state_of(module: nn.Module) -> set[int]:
    """The ids of a module's parts, parameters and buffers."""
    parts: list[object] = [*module.modules(), *module.parameters(), *module.buffers()]
    return {id(part) for part in parts}


def _attributes(part: nn.Module) -> Iterator[tuple[str, object]]:
    """The attributes of one module, without its submodules."""
    for name, value in vars(part).items():
        if name not in _TORCHS and "_hooks" not in name:
            yield name, value
    for kind in type(part).__mro__:
        for name, value in vars(kind).items() if _is_own(kind.__module__) else ():
            if not name.startswith("__") and not callable(value) and name not in vars(part):
                yield name, value


def _functions(part: nn.Module) -> Iterator[tuple[str, object]]:
    """The user's functions called by a module."""
    for name, hooks in vars(part).items():
        if name.endswith("_hooks") and isinstance(hooks, Mapping):
            yield from (("hook", hook) for hook in hooks.values())
    for kind in type(part).__mro__:
        if "forward" in vars(kind) and _is_own(kind.__module__):
            yield "forward", vars(kind)["forward"]


def _is_own(module: str) -> bool:
    """Whether a Python module is the user's: neither a library's nor part of ecrm."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return _is_own_file(file) if file else module == "__main__"


def _is_own_file(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, _ECRM, "<"))


def of_objects(named: Mapping[str, object], known: Set[int]) -> Seen:
    """The values reached from objects by attributes, and from functions by the variables used.

    Objects with `known` ids are left out: their state is compared elsewhere.
    """
    seen: Seen = {}
    walk = _Walk(known)
    for name, value in named.items():
        seen.update(walk.of(name, value, _DEEPEST))
    return seen | walk.cut


def first_change(before: Seen, after: Seen) -> str:
    """The first value that differs, in words; "" without a difference.

    A list that has only grown is no change: such lists are logs. `first_growth` finds grown lists.
    """
    for path, value in after.items():
        if path in before and before[path] != value and not isinstance(value, Length):
            numbers = isinstance(value, bool | int | float | str)
            return f"{path}, {before[path]!r} before and {value!r} now" if numbers else path
    return ""


def first_growth(before: Seen, after: Seen) -> str:
    """The path of the first list with a changed length; "" without any."""
    for path, value in after.items():
        if isinstance(value, Length) and path in before and before[path] != value:
            return path.removesuffix(_LENGTH)
    return ""


_LENGTH = " (length)"
_ECRM = f"{Path(__file__).parents[1]}/"


class _Walk:
    def __init__(self, known: Set[int] | Sequence[int]) -> None:
        self._visited = set(known)
        self._left = _MOST

    @property
    def cut(self) -> Seen:
        """An entry that says that the walk was cut short; empty after a whole walk."""
        return {CUT: True} if self._left < 0 else {}

    def of(self, path: str, value: Any, levels: int) -> Iterator[tuple[str, object]]:
        """(path, value) of everything below a value."""
        self._left -= 1
        if self._left < 0:
            return
        if isinstance(value, _PLAIN):
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
        if isinstance(value, list | deque):
            yield f"{path}{_LENGTH}", Length(len(value))
        for name, part in _parts(value):
            yield from self.of(f"{path}{name}", part, levels - 1)


def _digest(value: Any) -> str | None:
    """The content of a tensor, an array or a generator as text; None for anything else.

    "" for tensors and arrays that cannot be compared. A digest also for a long container, not a
    list, of plain values.
    """
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
    if isinstance(value, Mapping | list | tuple | deque) and len(value) > _LONG:
        each = value.values() if isinstance(value, Mapping) else value
        if all(type(one) in _PLAIN for one in each):
            return f"values {words_digest(repr(value)):016x}" if type(value) is not list else None
    return None


def _parts(value: Any) -> list[tuple[str, Any]]:
    """The parts of a container, an object or a function, with the continuation of the path."""
    if isinstance(value, Mapping):
        return [(f"[{_key(key, at)}]", each) for at, (key, each) in enumerate(value.items())]
    if isinstance(value, list | tuple | deque):
        return [(f"[{number}]", each) for number, each in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [("", repr(sorted(map(repr, value))))]
    if isinstance(value, functools.partial):
        return [("", value.func), (" argument", value.args), (" argument", value.keywords)]
    if isinstance(value, types.MethodType):
        return [("", value.__func__), (".__self__", value.__self__)]
    if isinstance(value, types.FunctionType):
        return _used_by(value)
    if type(value).__module__.partition(".")[0] in ("ecrm", "torchrec"):
        return []
    if isinstance(value, nn.Module):
        return _parts_of_module(value)
    attributes = dict(getattr(value, "__dict__", {}))
    for slot in getattr(type(value), "__slots__", ()) if not attributes else ():
        if hasattr(value, slot):
            attributes[slot] = getattr(value, slot)
    torchs = type(value).__module__.partition(".")[0] == "torch"
    dropped = _OPTIMIZERS - {"param_groups", "state"} if isinstance(value, Optimizer) else ()
    found = [
        (f".{name}", each)
        for name, each in attributes.items()
        if not (torchs and name.startswith("_")) and name not in dropped and "_hooks" not in name
    ]
    hooks = [each for name, each in attributes.items() if name.startswith("_optimizer_step_")]
    return [*found, *((" hook", hook) for of in hooks for hook in of.values())]


def _parts_of_module(module: nn.Module) -> list[tuple[str, Any]]:
    """All parts of a module outside the session, such as a teacher, weights included."""
    found: list[tuple[str, Any]] = []
    for path, part in module.named_modules():
        own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        found += [(f".{path}.{name}" if path else f".{name}", each) for name, each in own]
        keeps = [*_attributes(part), *_functions(part)]
        found += [(f".{path}.{name}" if path else f".{name}", each) for name, each in keeps]
    return found


def _key(key: object, at: int) -> str:
    """A key of a dict in words; for a parameter, as in optimizers, type and position."""
    return repr(key) if isinstance(key, str | int | float) else f"{type(key).__name__} {at}"


def _used_by(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The references of a user's function: variables around the function, defaults, and globals.

    For a library's function, such as a decorator's, only the functions around it.
    """
    found: list[tuple[str, Any]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            found.append((f" {name}", cell.cell_contents))
        except ValueError:  # not bound yet
            continue
    if not _is_own_file(function.__code__.co_filename):
        return [("", each) for _, each in found if isinstance(each, _FUNCTIONS)]
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

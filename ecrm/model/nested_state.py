"""Copies of nested state, as held by optimizers, schedulers and modules, and its way between ranks.

Nested state is tensors, numbers and words in dicts, lists and tuples, as returned by `state_dict`.
Numbers and arrays may be numpy's.
"""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ecrm.base.allocate import CPU
from ecrm.base.errors import UsageError
from ecrm.device.copies import on_device, on_host

_ON_DEVICE = "on a device"
"""The only key of a dict standing for a tensor that was not on the CPU when `written`."""
_ON_META = "on the meta device"
"""The only key of a dict standing for a tensor on the meta device, without values."""
_NUMPYS = "of numpy"
"""The only key of a dict standing for a numpy number or array: dtype, shape and digits."""
_FILLED = (dict, OrderedDict, Counter)
"""Dict classes consisting of only items and attributes."""


def placed(source: Any, target: Any = None) -> Any:
    """A copy of nested state, in the memory of `target` wherever parts of `target` fit.

    A tensor of `target` fits if shape, dtype, layout and device are the same: the tensor is
    overwritten. Dicts and lists of the same type are changed in place. Returns `target` itself if
    `target` fits. Nothing of the result is shared with `source`. A tensor appearing twice in
    `source` becomes two.
    """
    copies: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        result = _placed(source, target, copies)
        if copies:
            torch._foreach_copy_([to for to, _ in copies], [from_ for _, from_ in copies])
    return result


def _placed(source: Any, target: Any, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """As `placed`, but fitting tensors of `target` are only added to `copies`, as (to, from)."""
    if isinstance(source, Tensor):
        if not _fits(source, target):
            return source.detach().clone()
        copies.append((target, source))
        return target
    if isinstance(source, dict):
        return _placed_dict(source, target, copies)
    if type(source) in (list, tuple):
        fits = type(target) is type(source) and len(target) == len(source)
        targets = target if fits else [None] * len(source)
        items = [_placed(value, at, copies) for value, at in zip(source, targets, strict=True)]
        if isinstance(source, list) and isinstance(target, list):
            target[:] = items
            return target
        return type(source)(items)
    return source if isinstance(source, int | float | str | None) else copy.deepcopy(source)


def _placed_dict(source: dict[Any, Any], target: Any, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """As `_placed`. The order of keys and the attributes of a subclass are from `source`."""
    before: dict[Any, Any] = {}
    put: Callable[[Any, Any, Any], None] = dict.__setitem__  # a class may add to present values
    if type(target) is type(source) and type(source) in _FILLED:
        before, put = dict(target), type(target).__setitem__
        target.clear()
    else:
        target = copy.copy(source)
    for key, value in source.items():
        put(target, key, _placed(value, before.get(key), copies))  # Counter.update would add
    if attributes := getattr(source, "__dict__", None):
        vars(target).update(_placed(attributes, None, copies))
    return target


def _fits(source: Tensor, target: Any) -> bool:
    return (
        isinstance(target, Tensor)
        and target.shape == source.shape
        and target.dtype == source.dtype
        and target.layout == source.layout
        and target.device == source.device
        and target.is_leaf
        and not target.is_inference()
    )


def leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of everything in nested state but dicts, lists and tuples.

    A name is the keys on the way to the value, joined by dots.
    """
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from leaves(value, f"{name}.{number}" if name else str(number))
    else:
        yield name, state


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements in order, uint8 [N]; a view of a contiguous tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and torch.equal(bytes_of(one), bytes_of(other))


def packed(named: Mapping[str, Tensor | None]) -> Tensor:
    """Named tensors as bytes, uint8 [N], with their names, dtypes and shapes.

    The bytes are a copy on the CPU for any device of the tensors. None stands for a name without a
    tensor.
    """
    heads = [
        [name, None, None]
        if tensor is None
        else [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in named.items()
    ]
    words = json.dumps(heads).encode()
    start = len(words).to_bytes(8, "little") + words
    parts = on_host(*(bytes_of(tensor) for tensor in named.values() if tensor is not None))
    return torch.cat([torch.frombuffer(bytearray(start), dtype=torch.uint8), *parts])


def unpacked(data: Tensor) -> dict[str, Tensor | None]:
    """The tensors of a `packed` message, in memory of their own on the CPU, in the same order."""
    size = int.from_bytes(data[:8].numpy().tobytes(), "little")
    heads = json.loads(data[8 : 8 + size].numpy().tobytes())
    named: dict[str, Tensor | None] = {}
    at = 8 + size
    for name, kind, shape in heads:
        if kind is None:
            named[name] = None
            continue
        dtype: torch.dtype = getattr(torch, kind)
        end = at + math.prod(shape) * dtype.itemsize
        named[name] = data[at:end].clone().view(dtype).reshape(shape)
        at = end
    return named


def written(state: Any) -> Tensor:
    """Nested state as bytes, uint8 [N], with a mark for each tensor on a device."""
    file = io.BytesIO()
    torch.save(_off_device(placed(state)), file)  # a view would be saved with its whole base tensor
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def off_meta(state: Any) -> Any:
    """The same state; meta tensors become shape and dtype under the key _ON_META."""

    def off(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        return {_ON_META: [list(value.shape), str(value.dtype).removeprefix("torch.")]}

    return _mapped(state, off)


def on_meta(state: Any) -> Any:
    """The inverse of `off_meta`; the state is changed in place."""

    def on(said: tuple[list[int], str]) -> Tensor:
        shape, kind = said
        return torch.empty(shape, dtype=getattr(torch, kind), device="meta")

    return _put_back(state, _ON_META, on)


def _off_device(state: Any) -> Any:
    """The same state on the CPU, in types readable by torch: see _ON_DEVICE and _NUMPYS."""
    there = [value for _, value in leaves(state) if isinstance(value, Tensor) and not value.is_cpu]
    here = dict(zip(map(id, there), on_host(*there)))

    def off(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.is_cpu else {_ON_DEVICE: here[id(value)]}
        if not isinstance(value, np.generic) and type(value) is not np.ndarray:
            return value
        if value.dtype.hasobject or value.dtype.names:
            return value
        shape = list(value.shape) if type(value) is np.ndarray else None
        return {_NUMPYS: [value.dtype.str, shape, value.tobytes().hex()]}

    return _mapped(state, off)


def _of_numpy(said: tuple[str, list[int] | None, str]) -> Any:
    """The number or array written as `said`."""
    kind, shape, digits = said
    data = bytes.fromhex(digits)
    values = np.empty(() if shape is None else shape, kind)
    if data:
        values = np.frombuffer(data, kind).reshape(values.shape).copy()
    return values[()] if shape is None else values


def _mapped(state: Any, change: Callable[[Any], Any]) -> Any:
    """The same state, with `change` applied to everything but dicts, lists and tuples."""
    if isinstance(state, dict):
        result = copy.copy(state)
        for key, value in state.items():
            result[key] = _mapped(value, change)  # a Counter's `update` would add
        return result
    if type(state) in (list, tuple):
        return type(state)(_mapped(value, change) for value in state)
    return change(state)


def _put_back(state: Any, mark: str, make: Callable[[Any], Any]) -> Any:
    """The same state, changed in place: `make` replaces dicts with `mark` as the only key."""
    if isinstance(state, dict):
        if state.keys() == {mark}:
            return make(state[mark])
        for key, value in state.items():
            state[key] = _put_back(value, mark, make)
    elif isinstance(state, list):
        state[:] = [_put_back(value, mark, make) for value in state]
    elif type(state) is tuple:
        return tuple(_put_back(value, mark, make) for value in state)
    return state


def check_readable(state: Any, whose: str) -> None:
    """Raise UsageError, naming the entry, if nested state cannot be `written` and `read`."""
    light = _mapped(state, _light)
    if _is_readable(light):
        return
    path, value = _first_unreadable(light, f"{whose} ")
    kind = type(value)
    what = f"a {kind.__module__}.{kind.__qualname__}".replace("a builtins.", "a ")
    if kind in _FILLED:
        what += " with a key that is no number, word or tuple"
    with torch.serialization.safe_globals([kind]):
        name_it = _is_readable(value)
    raise UsageError(
        f"{path} cannot be read back by other ranks: it is {what}",
        otherwise="keep tensors, numbers and words there, in dicts, lists and tuples"
        + f", or call torch.serialization.add_safe_globals([{kind.__name__}])" * name_it,
    )


def _light(value: Any) -> Any:
    """None for a tensor sure to be readable, else the value."""
    return (
        None if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided else value
    )


def _is_readable(state: Any) -> bool:
    try:
        read(written(state))
    except Exception:  # copying or pickling a value may raise any error of its class
        return False
    return True


def _first_unreadable(state: Any, path: str) -> tuple[str, Any]:
    """The path and value of the innermost part not readable by itself."""
    parts: list[tuple[Any, Any]] = []
    if isinstance(state, Mapping):
        parts = list(state.items())
    elif isinstance(state, list | tuple):
        parts = list(enumerate(state))
    for key, value in parts:
        if not _is_readable(value):
            return _first_unreadable(value, f"{path}{'' if path.endswith(' ') else '.'}{key}")
    return path.rstrip(), state


def read(data: Tensor, device: torch.device = CPU) -> Any:
    """The state of a `written` message; tensors once on a device are put on `device`.

    Raises UsageError for objects of classes not known to be safe. Safe are tensors, numbers, words,
    and classes given to `torch.serialization.add_safe_globals`.
    """
    try:
        loaded = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = found[1].rstrip(",") if found else "an object"
        raise UsageError(
            f"a saved state has {what}, which is not read",
            otherwise="call torch.serialization.add_safe_globals with its class in the script, "
            "as the script did that has saved it",
        ) from None
    loaded = _put_back(loaded, _ON_DEVICE, lambda tensor: on_device(device, tensor))
    return _put_back(loaded, _NUMPYS, _of_numpy)

"""Copies of nested state, which optimizers, schedulers and modules hold, and how they travel.

Nested state is tensors, numbers and words in dicts, lists and tuples, as `state_dict` gives them.
"""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ecrm.allocate import CPU
from ecrm.errors import UsageError
from ecrm.transport.gpu_copies import on_device, on_host

_ON_DEVICE = "on a device"
"""The one key of a dict in the place of a tensor that was not on the CPU when it was `written`."""
_ON_META = "on the meta device"
"""The one key of a dict in the place of a tensor without numbers."""


def placed(source: Any, target: Any = None) -> Any:
    """A copy of nested state, in the memory of `target` wherever its parts fit there.

    A tensor of `target` fits where shape, dtype and device are the same: it is overwritten. Dicts
    and lists of the same type are changed in place. What is returned is `target`, if that fits.
    Nothing in it is shared with `source`. Tensors that are one and the same in `source` become
    several.
    """
    copies: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        result = _placed(source, target, copies)
        if copies:
            torch._foreach_copy_([to for to, _ in copies], [from_ for _, from_ in copies])
    return result


def _placed(source: Any, target: Any, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """As `placed`, but tensors of `target` that fit are only added to `copies`, (to, from)."""
    if isinstance(source, Tensor):
        if not _fits(source, target):
            return source.detach().clone()
        copies.append((target, source))
        return target
    if isinstance(source, dict):
        if type(target) is not type(source):
            result = copy.copy(source)
            for key, value in source.items():
                result[key] = _placed(value, None, copies)
            return result
        for key in target.keys() - source.keys():
            del target[key]
        for key, value in source.items():
            target[key] = _placed(value, target.get(key), copies)
        return target
    if type(source) in (list, tuple):
        fits = type(target) is type(source) and len(target) == len(source)
        targets = target if fits else [None] * len(source)
        items = [_placed(value, at, copies) for value, at in zip(source, targets, strict=True)]
        if isinstance(source, list) and isinstance(target, list):
            target[:] = items
            return target
        return type(source)(items)
    return source if isinstance(source, int | float | str | None) else copy.deepcopy(source)


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
    """(name, value) of everything in nested state that is not a dict, list or tuple.

    A name has the keys that lead there, with dots between them.
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
    """The bytes of a tensor's elements in order, uint8 [N]; a view where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits."""
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and torch.equal(bytes_of(one), bytes_of(other))


def packed(named: Mapping[str, Tensor | None]) -> Tensor:
    """Named tensors as bytes, uint8 [N], which say their names, dtypes and shapes.

    The bytes are a copy on the CPU, wherever the tensors are. None stands for a name without a
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
    """What was `packed`, in memory of its own on the CPU, in the same order."""
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
    """Nested state as bytes, uint8 [N]. They say which tensors were on a device."""
    file = io.BytesIO()
    torch.save(_off_device(placed(state)), file)  # a view would be saved with all it is a view of
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def off_meta(state: Any) -> Any:
    """The same state; a tensor on the meta device is shape and dtype under the key _ON_META."""

    def off(tensor: Tensor) -> Any:
        if not tensor.is_meta:
            return tensor
        return {_ON_META: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]}

    return _mapped(state, off)


def on_meta(state: Any) -> Any:
    """What was `off_meta`, changed in place."""

    def on(said: tuple[list[int], str]) -> Tensor:
        shape, kind = said
        return torch.empty(shape, dtype=getattr(torch, kind), device="meta")

    return _put_back(state, _ON_META, on)


def _off_device(state: Any) -> Any:
    """The same state on the CPU; a tensor of a device is in a dict with the key _ON_DEVICE."""
    there = [value for _, value in leaves(state) if isinstance(value, Tensor) and not value.is_cpu]
    here = dict(zip(map(id, there), on_host(*there)))
    return _mapped(state, lambda t: t if t.is_cpu else {_ON_DEVICE: here[id(t)]})


def _mapped(state: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same state with what `change` makes of its tensors."""
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, dict):
        result = copy.copy(state)
        for key, value in state.items():
            result[key] = _mapped(value, change)  # a Counter's `update` would add
        return result
    if type(state) in (list, tuple):
        return type(state)(_mapped(value, change) for value in state)
    return state


def _put_back(state: Any, mark: str, make: Callable[[Any], Tensor]) -> Any:
    """The same state, changed in place: dicts with the one key `mark` are made tensors."""
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
    """Raise UsageError where nested state could be `written` and not `read`."""
    read(written(state), whose=whose)


def read(
    data: Tensor,
    device: torch.device = CPU,
    whose: str = "an optimizer, a scheduler or a registered object",
) -> Any:
    """What was `written`. What was on a device then is on this one.

    Raises UsageError where it has objects of classes not known to be safe: it names `whose` state
    it is. Those are all but tensors, numbers, words and what
    `torch.serialization.add_safe_globals` was told of.
    """
    try:
        loaded = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
        return _put_back(loaded, _ON_DEVICE, lambda tensor: on_device(device, tensor))
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f", since it has {found[1]}" if found else ""
        raise UsageError(
            f"the state of {whose} cannot be read back{what}: keep tensors, numbers and words in "
            "it, in dicts, lists and tuples, or name its classes to "
            "torch.serialization.add_safe_globals"
        ) from None

"""The buffers of a module: a list of all, and a way to put all back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ecrm.model.nested_state import placed

BufferState = dict[str, Tensor | None]
"""Buffers by name; None for a buffer registered without a tensor."""


def live_buffers(module: nn.Module) -> BufferState:
    """All present buffers of a module, each once: the first name counts.

    Meta and sparse buffers are left out: both kinds are taken for constant.
    """
    return {name: owner._buffers[key] for name, owner, key in _places(module)}


def put_buffers(module: nn.Module, saved: Mapping[str, Tensor | None]) -> None:
    """Set the buffers of a module to `saved`, in place if they fit.

    `saved` has the same names as the module. If a forward has replaced a buffer's tensor, the old
    values come back too.
    """
    for name, owner, key in list(_places(module)):
        owner._buffers[key] = placed(saved[name], owner._buffers[key])


def _places(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, owning submodule, key in the submodule) of each buffer."""
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                if id(buffer) in seen or buffer.is_meta or buffer.layout != torch.strided:
                    continue
                seen.add(id(buffer))
            yield f"{prefix}.{key}" if prefix else key, owner, key

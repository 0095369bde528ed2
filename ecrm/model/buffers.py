"""The buffers of a module: which there are, and how they are put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ecrm.model.nested_state import placed

BufferState = dict[str, Tensor | None]
"""Buffers by name; None for one that is registered without a tensor."""


def live_buffers(module: nn.Module) -> BufferState:
    """All buffers of a module as they are, each once: its first name counts.

    Those on the meta device and sparse ones are not among them: they are taken for constant.
    """
    return {name: owner._buffers[key] for name, owner, key in _places(module)}


def put_buffers(module: nn.Module, saved: Mapping[str, Tensor | None]) -> None:
    """Make the buffers of a module those of `saved`, in place where they fit.

    `saved` has the names that the module has. A forward may have put another tensor in the place of
    a buffer: that is undone.
    """
    for name, owner, key in list(_places(module)):
        owner._buffers[key] = placed(saved[name], owner._buffers[key])


def _places(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, the submodule that has it, its key there) of each buffer."""
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                if id(buffer) in seen or buffer.is_meta or buffer.layout != torch.strided:
                    continue
                seen.add(id(buffer))
            yield f"{prefix}.{key}" if prefix else key, owner, key

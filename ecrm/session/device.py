"""The device for training a session's module, and the move of the module to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ecrm.base.allocate import CPU
from ecrm.base.errors import UsageError
from ecrm.device.imitation import imitating
from ecrm.model.determinism import prepare_cuda
from ecrm.process.device import device_of
from ecrm.run.this_rank import is_rank, this_rank


def session_device(wanted: torch.device | str | None) -> torch.device:
    """The device of this process for a session.

    On a rank train.device decides. In a process alone the device is `wanted`, or the CPU. Raises
    UsageError if the device does not exist, or if `wanted` is not the device of the rank.
    """
    try:
        torch.device(wanted or CPU)
    except RuntimeError:
        raise UsageError(
            f"Session(device={str(wanted)!r}) is no device", otherwise="give 'cpu' or 'cuda'"
        ) from None
    if is_rank():
        config = this_rank().spec.config
        device = device_of(config, "train.device")
        asked = device if wanted is None else torch.device(wanted)
        if asked.type != device.type:
            raise UsageError(
                f"the script has Session(device={str(wanted)!r}), but train.device is "
                f"{config.train.device}",
                otherwise="leave the argument out, and say it by train.device",
            )
        if asked.index not in (None, device.index or 0):
            raise UsageError(
                f"the script has Session(device={str(wanted)!r}), but this rank has {device}: "
                "ranks of a host share its GPUs in turn",
                otherwise=f"type Session(device={asked.type!r})",
            )
        return device
    device = torch.device(wanted or CPU)
    if device.type == "cpu":
        return CPU
    prepare_cuda()
    try:
        device = torch.empty(0, device=device).device
        if not imitating():
            torch.cuda.set_device(device)  # `seed_slot` seeds the current device
        return device
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise UsageError(
            f"Session(device={str(wanted)!r}): torch {torch.__version__} cannot use it: {why}",
            otherwise="leave the argument out to train on the CPU",
        ) from None


def move(module: nn.Module, device: torch.device, collections: Sequence[Any] = ()) -> None:
    """Move the parameters and buffers of a module to a GPU; do nothing for the CPU.

    Tensors on the meta device stay. Parameters stay the same objects. A buffer in several places
    of the module stays a single buffer. `collections` are the session's collections in the module:
    from now on `device` is also the device of looked up rows.
    """
    if device.type == "cpu":
        return
    for collection in collections:
        collection._device = device
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def there(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        if id(tensor) not in moved:
            moved[id(tensor)] = (tensor, tensor.to(device))
        return moved[id(tensor)][1]

    module._apply(there)

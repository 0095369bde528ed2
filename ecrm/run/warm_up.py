"""Kernels for the GPU, compiled before a run begins, to keep steps from waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

from ecrm.config.schema import Config
from ecrm.kernels.warm_up import Shapes, warm_up
from ecrm.placement.tables import RowSpace
from ecrm.process.device import DEVICES, device_of
from ecrm.run.gather import gather_results
from ecrm.transport.base import Transport


def warm_up_kernels(
    transport: Transport,
    config: Config,
    spaces: Iterable[RowSpace],
    features: int | None,
    any_gpu: bool,
    say_on_first: Callable[[str], None],
) -> None:
    """Collective: compile the kernels needed on this rank's GPU, and print the time taken.

    `features` is the number of embeddings of a sample multiplied by the model on the GPU,
    `None` for none. A rank without a GPU compiles no kernels. `any_gpu`: some rank has a GPU.
    """
    devices = [device_of(config, name) for name in DEVICES]
    used = [device for device in devices if device.type == "cuda"]
    interpreted = config.testing.imitated_gpu and config.kernels.backend != "reference"
    if not any_gpu:
        return
    seconds = None
    if used and not interpreted:
        began = time.monotonic()
        for shapes in shapes_of(spaces, config.train.sparse_optimizer, features):
            warm_up(shapes, used[0])
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = time.monotonic() - began
    took = [
        each for each in gather_results(transport, lambda: seconds).values() if each is not None
    ]
    if took:
        say_on_first(f"kernels of the GPU are ready after {max(took):.1f} s")


def shapes_of(spaces: Iterable[RowSpace], optimizer: str, features: int | None) -> list[Shapes]:
    """The different shapes of row spaces; `optimizer` is for spaces without an own optimizer."""
    found = set()
    for space in spaces:
        own = space.optimizer
        l2 = own is not None and own.weight_decay > 0 and not own.decoupled
        found.add(Shapes(space.dim, own.name if own is not None else optimizer, l2, features))
    return sorted(found, key=str)

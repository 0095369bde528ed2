"""The origin of the first NaN or infinity in the forward of a slot."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ecrm.device.copies import on_host
from ecrm.model.slot_batch import SlotBatch
from ecrm.placement.tables import RowSpace


def origin(module: nn.Module, batch: SlotBatch, values: Tensor, space: RowSpace) -> str:
    """The first nonfinite part in the forward of a slot, in words; changes nothing.

    `values` are the rows of the slot, [U, D]. Batch and values are on the module's device.
    """
    (finite,) = on_host(values.isfinite().all(1))
    bad = batch.rows[~finite].tolist()
    if bad:
        return f"in {space.in_words(bad)}"
    for name, parameter in module.named_parameters():
        if not parameter.isfinite().all():
            return f"in parameter {name}"
    return _layer(module, batch, values) or "in the loss itself"


def _layer(module: nn.Module, batch: SlotBatch, values: Tensor) -> str:
    """The first layer with a nonfinite output; "" if all outputs are finite."""
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda layer, inputs, output: None if output.isfinite().all() else found.append(name)

    leaves = [(name, layer) for name, layer in module.named_modules() if not any(layer.children())]
    hooks = [layer.register_forward_hook(look(name)) for name, layer in leaves]
    try:
        with torch.no_grad():
            module(batch.dense, values, batch.places)
    finally:
        for hook in hooks:
            hook.remove()
    return f"in the output of layer {found[0]}" if found else ""

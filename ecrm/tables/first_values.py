"""First values of the rows of a table, from TorchRec's config of the table and its weight."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ecrm.base.errors import UsageError
from ecrm.placement.initial_values import InitFunction, Initial, Uniform

LARGEST_VALUES = 256 << 20
"""Most bytes of first values of all tables of a model together."""

_ALIKE: tuple[Callable[..., Tensor], ...] = (nn.init.normal_, nn.init.trunc_normal_)
"""Functions filling a single row the same way as a whole table."""


def initial_of(config: Any) -> Initial | None:
    """The first values of rows drawn on their servers; `None` for TorchRec's default.

    Also `None` if `init_fn` must see the whole table: `first_values` has the values then.
    """
    usual = math.sqrt(1 / config.num_embeddings)
    initial = _row_by_row(config)
    return None if initial == Uniform(-usual, usual) else initial


def first_values(tables: Mapping[str, tuple[Any, nn.Parameter]], seed: int) -> dict[str, Tensor]:
    """The values of tables not drawn row by row, float32 [rows, dim]; `tables` by name.

    The result has tables built on a device, not on meta, and tables with an `init_fn` for the whole
    table. `init_fn` is called now, with a generator seeded by `seed` and the table's number.

    Raises UsageError if the values are larger than `LARGEST_VALUES`.
    """
    built = [name for name, (_, weight) in tables.items() if not weight.is_meta]
    filled = [
        name
        for name, (config, _) in tables.items()
        if name not in built and _row_by_row(config) is None
    ]
    _check_size(
        {name: tables[name][1].numel() * 4 for name in built},
        "built in this process",
        'build them with device=torch.device("meta")',
    )
    _check_size(
        {name: tables[name][1].numel() * 4 for name in built + filled},
        "filled by an init_fn of their own",
        "take one of torch.nn.init that fills each row alike, such as uniform_ or normal_",
    )
    values = {name: _copy(tables[name][1]) for name in built}
    for number, (name, (config, _)) in enumerate(tables.items()):
        if name in filled:
            values[name] = _filled(config, seed + 1_000_003 * number)
    return values


def _copy(weight: nn.Parameter) -> Tensor:
    """Copy a weight to the CPU, so that later changes of the weight do not count."""
    return weight.detach().to("cpu", copy=True).contiguous()


def _check_size(sizes: Mapping[str, int], what: str, otherwise: str) -> None:
    total = sum(sizes.values())
    if total > LARGEST_VALUES:
        raise UsageError(
            f"tables of {total >> 20:,} MB, such as {max(sizes, key=lambda name: sizes[name])}, "
            f"are {what}, and a session takes at most {LARGEST_VALUES >> 20} MB of such",
            otherwise=otherwise,
        )


def _row_by_row(config: Any) -> Initial | None:
    """The function for filling rows singly as `init_fn` fills the table; `None` if impossible."""
    fill = config.init_fn or nn.init.normal_  # as nn.Embedding begins
    function, given = fill, {}
    if isinstance(fill, functools.partial) and not fill.args:
        function, given = fill.func, fill.keywords
    if given.get("generator") is not None:
        return None
    if function is nn.init.uniform_:
        return Uniform(float(given.get("a", 0.0)), float(given.get("b", 1.0)))
    if function is nn.init.constant_ and "val" in given:
        return Uniform(float(given["val"]), float(given["val"]))
    if function is nn.init.zeros_:
        return Uniform(0.0, 0.0)
    if function is nn.init.ones_:
        return Uniform(1.0, 1.0)
    return InitFunction(fill) if function in _ALIKE else None


def _filled(config: Any, seed: int) -> Tensor:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed % (1 << 63))
        values = torch.randn(config.num_embeddings, config.embedding_dim)  # as nn.Embedding begins
        config.init_fn(values)
    return values

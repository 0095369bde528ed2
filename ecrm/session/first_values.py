"""What the rows of a table begin with, from TorchRec's config of the table and its weight."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ecrm.errors import UsageError

LARGEST_VALUES = 256 << 20
"""Bytes of values that the tables of a model may bring along, all together."""


def first_values(tables: Mapping[str, tuple[Any, nn.Parameter]], seed: int) -> dict[str, Tensor]:
    """The values of tables that bring them along, float32 [rows, dim]; `tables` by their names.

    Those are tables that were not built on the meta device, and those that do not begin as
    TorchRec's do by default. Their `init_fn` is called here, with a generator seeded by `seed` and
    the table's number.

    Raises UsageError if they are larger than `LARGEST_VALUES`.
    """
    built = [name for name, (_, weight) in tables.items() if weight.device.type != "meta"]
    drawn = [
        name
        for name, (config, _) in tables.items()
        if name not in built and not _begins_as_usual(config)
    ]
    sizes = {name: weight.numel() * 4 for name, (_, weight) in tables.items()}
    for names, what, otherwise in (
        (built, "built in this process", 'build them with device=torch.device("meta")'),
        (
            built + drawn,
            "filled by an init_fn or between bounds of their own",
            "leave out init_fn, weight_init_min and weight_init_max",
        ),
    ):
        total = sum(sizes[name] for name in names)
        if total > LARGEST_VALUES:
            largest = max(names, key=lambda name: sizes[name])
            raise UsageError(
                f"tables of {total >> 20:,} MB, such as {largest}, are {what}, "
                f"and a session takes at most {LARGEST_VALUES >> 20} MB of such",
                otherwise=otherwise,
            )
    values = {name: tables[name][1].detach().cpu() for name in built}
    for number, name in enumerate(tables):
        if name in drawn:
            values[name] = _filled(tables[name][0], seed + 1_000_003 * number)
    return values


def _begins_as_usual(config: Any) -> bool:
    """Whether rows are drawn between -1 / sqrt(rows) and 1 / sqrt(rows)."""
    fill, usual = config.init_fn, math.sqrt(1 / config.num_embeddings)
    return (
        isinstance(fill, functools.partial)
        and (fill.func, fill.args) == (nn.init.uniform_, ())
        and fill.keywords == {"a": -usual, "b": usual}
    )


def _filled(config: Any, seed: int) -> Tensor:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed % (1 << 63))
        values = torch.randn(config.num_embeddings, config.embedding_dim)  # as nn.Embedding begins
        if config.init_fn is not None:
            config.init_fn(values)
    return values

"""The rows of a config's `data.path` in batches: Criteo rows, or a prepared table.

Legend: B samples, F features, n dense columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from ecrm.checkpoint.compatibility import capped
from ecrm.config import Config
from ecrm.data.columns.table import Table, TableRows
from ecrm.data.dataset import CriteoDataset
from ecrm.data.described import Described, describe
from ecrm.data.hashing import cap_rows
from ecrm.session.data import Indexed

Batch = tuple[Tensor, KeyedJaggedTensor, Tensor]
"""Dense columns, float32 [B, n], the ids of F features, and labels, float32 [B]."""


class RecipeRows:
    """The facts of a dataset needed by a model, all else `about` the dataset, and batches.

    `tables`, `features`, `dense` and `weighted` are those of `Described`, with at most
    `model.max_rows_per_table` rows of a table. `inputs` is the width of a batch's dense columns: a
    dataset without dense columns has one column of ones. `batch_of(step, slot)` is a batch for
    training, `held_out` all batches for evaluation, None without held-out rows.
    """

    def __init__(
        self,
        config: Config,
        about: Described,
        batch_of: Callable[[int, int], Batch],
        held_out: Indexed | None,
    ) -> None:
        self.about = about
        self.tables = capped(about.tables, config.model.max_rows_per_table)
        self.features, self.dense, self.weighted = about.features, about.dense, about.weighted
        self.inputs = max(1, len(about.dense))
        self.batch_of, self.held_out = batch_of, held_out


def open_rows(config: Config) -> RecipeRows:
    """Open the dataset at `data.path`. Raises UsageError and DataError as `describe` does."""
    about = describe(config.data.path, config.data.eval_fraction)
    return (_of_table if about.is_table else _of_criteo)(config, about)


def _of_criteo(config: Config, about: Described) -> RecipeRows:
    """Criteo rows, in the order of the file, pass after pass."""
    size = config.train.global_batch
    data = CriteoDataset.open(
        config.data.path, config.model.max_rows_per_table or None, config.data.eval_fraction
    )
    names = [name for name, _ in data.tables]

    def batch(found: tuple[Tensor, Tensor, Tensor]) -> Batch:
        dense, ids, labels = found
        one = torch.ones(ids.numel(), dtype=torch.int32)
        return dense, KeyedJaggedTensor(names, ids.t().reshape(-1), lengths=one), labels

    def batch_of(step: int, slot: int) -> Batch:
        return batch(data.batch_for(step, slot, config.slots, size))

    def held_out(numbers: list[int]) -> Batch:
        return batch(data.eval_batch(numbers[0], len(numbers)))

    rows = range(data.eval_rows)
    evaluated = Indexed(rows, size, collate=held_out, shuffle=False) if rows else None
    return RecipeRows(config, about, batch_of, evaluated)


def _of_table(config: Config, about: Described) -> RecipeRows:
    """Rows of a prepared table, in the order of time, or in a new random order in every pass."""
    table, cap = Table(config.data.path), config.model.max_rows_per_table
    size, slots = config.train.global_batch, config.slots
    caps = None
    if cap:
        caps = np.array([max(2, min(about.tables[name], cap)) for name in about.features.values()])

    def batch(found: TableRows | Sequence[TableRows]) -> Batch:
        assert isinstance(found, TableRows)
        if caps is not None:
            cap_rows(found.ids, np.repeat(caps, found.lengths.sum(1)))
        made: Any = table.collate(found)
        dense = made.dense_features if about.dense else torch.ones(len(found), 1)
        return dense, made.sparse_features, made.labels

    train = Indexed(
        table.train, size // slots, batch, shuffle=not about.ordered, seed=config.train.seed
    )
    held_out = table.held_out
    evaluated = Indexed(held_out, size, batch, shuffle=False) if len(held_out) else None
    return RecipeRows(config, about, lambda step, slot: train.batch(step, slot, slots), evaluated)

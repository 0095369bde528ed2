"""The makings of a run's shards: the same for every shard in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ecrm.base.allocate import Allocate, ZerosOn, lazy_zeros
from ecrm.device.copies import on_device, on_host
from ecrm.placement.sparse_optimizer import SparseOptimizer, SparseRate
from ecrm.placement.stripes import RowLayout, StripeShape, row_layouts
from ecrm.placement.tables import RowSpace, Table, row_spaces
from ecrm.protection.base import Protection
from ecrm.storage.base import NativeStore, Store
from ecrm.storage.hosted import HostedShard, ShardSpace
from ecrm.storage.initial_rows import InitialRows


@dataclass(frozen=True)
class _InitialOfShard:
    """Initial values of a shard's local rows."""

    values: InitialRows
    layout: RowLayout
    shard: int

    def __call__(self, local: Tensor) -> Tensor:
        """Float32 [R, dim]; R local rows, int64."""
        return self.values(self._rows(local))

    def begin(self, values: Tensor, touched: Tensor, targets: Tensor, local: Tensor) -> None:
        """`InitialRows.begin` of local rows."""
        self.values.begin(values, touched, targets, self._rows(local))

    def _rows(self, local: Tensor) -> Tensor:
        """Row numbers of local rows, on their device; the places of tables are on the CPU."""
        if self.layout.places is None or local.is_cpu:
            return self.layout.rows_of(self.shard, local)
        return on_device(local.device, self.layout.rows_of(self.shard, *on_host(local)))


class ShardStores:
    """Makes shards.

    `spaces` are the row spaces; `record_bytes` is the size of a record, by space, `kept_bytes` the
    size in a checkpoint. `optimizer` is for tables without their own. `allocate` gives the memory
    of rows, `allocate_shared` the memory of rows looked up and of deltas. `rate` is a factor on the
    learning rate of all rows by step. `seed` is of the initial values. `whole_tables`: whether
    small tables lie whole on shards.
    """

    def __init__(
        self,
        optimizer: SparseOptimizer,
        tables: Sequence[Table],
        seed: int,
        allocate: Allocate = lazy_zeros,
        allocate_shared: Allocate = lazy_zeros,
        rate: SparseRate | None = None,
        whole_tables: bool = False,
    ) -> None:
        self.spaces, self._whole_tables = row_spaces(tables), whole_tables
        self.allocate, self._allocate_shared = allocate, allocate_shared
        self.optimizer, self.rate, self.seed = optimizer, rate, seed
        self._initial = [InitialRows(space, seed) for space in self.spaces]
        of_one = allocate if isinstance(allocate, ZerosOn) else None
        alone = [self._store(space, 1, torch.empty_like, of_one) for space in self.spaces]
        self.record_bytes = tuple(store.record_bytes for store in alone)
        self.kept_bytes = tuple(store.kept_bytes for store in alone)

    def layouts(self, shape: StripeShape) -> tuple[RowLayout, ...]:
        """The place of the rows of every row space under a stripe shape."""
        return row_layouts(self.spaces, shape, self._whole_tables)

    def initial(self, space: int, rows: Tensor) -> Tensor:
        """Values of rows of a space, int64 [U], before any update, float32 [U, dim]."""
        return self._initial[space](rows)

    def host(
        self,
        shards: Iterable[int],
        layouts: Sequence[RowLayout],
        protection: Protection,
        missing: bool,
    ) -> dict[ShardSpace, HostedShard]:
        """New shards with all rows `missing`, or with rows never updated.

        `protection` may give memory with some rows already in place.
        """
        return {
            (shard, space): HostedShard(
                self._new(shard, space, layout, protection),
                layout.data_rows_per_shard,
                missing,
                layout.shape.k,
                self._allocate_shared,
            )
            for shard in shards
            for space, layout in enumerate(layouts)
        }

    def _new(self, shard: int, space: int, layout: RowLayout, protection: Protection) -> Store:
        initial = _InitialOfShard(self._initial[space], layout, shard)
        allocate = protection.allocator(shard, space) or self.allocate
        return self._store(self.spaces[space], layout.data_rows_per_shard, initial, allocate)

    def _store(
        self,
        space: RowSpace,
        rows: int,
        initial: Callable[[Tensor], Tensor],
        allocate: Allocate | None = None,
    ) -> Store:
        optimizer = space.optimizer or self.optimizer
        return NativeStore(rows, space.dim, optimizer, initial, allocate, self.rate)

    def bytes_of_a_shard(self, layouts: Sequence[RowLayout]) -> int:
        """Bytes of a shard's rows and redundancy."""
        return sum(
            size * (layout.data_rows_per_shard + layout.parity_rows_per_shard)
            for size, layout in zip(self.record_bytes, layouts, strict=True)
        )

    def memory_of_a_shard(self, layouts: Sequence[RowLayout]) -> list[Tensor]:
        """Memory for a further shard's rows and redundancy, not handed out yet."""
        memory: list[Tensor] = []
        for space, layout, size in zip(self.spaces, layouts, self.record_bytes, strict=True):
            # a store of a single row, for the shapes alone
            record = self._store(space, 1, torch.empty_like).memory
            memory += [lazy_zeros(layout.data_rows_per_shard, *part.shape[1:]) for part in record]
            memory.append(lazy_zeros(layout.parity_rows_per_shard, size, dtype=np.uint8))
        return memory

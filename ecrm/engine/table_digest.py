"""Digests of the tables: sums of hashes by every rank, and SHA-256 of all rows by one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from ecrm.device.copies import on_host
from ecrm.engine.engine import Engine
from ecrm.kernels.row_digest import LANES, row_digest
from ecrm.placement.tables import RowSpace
from ecrm.storage.base import Store
from ecrm.transport.message import Part, in_groups, tensors

CHUNK_ROWS = 65_536
PARTS = (Store.lookup, Store.lookup_state)


def table_sums(engine: Engine, to: int) -> dict[str, str] | None:
    """Collective, nothing missing: {table: sums of the hashes of rows and of optimizer state}.

    Every rank adds up the rows of its shards, and 64 bytes a table travel. The sums do not depend
    on the layout. A table's sums are 128 hexadecimal digits. Rank `to` gets the digests, the
    remaining ranks `None`. Raises as `table_digests` does.
    """
    names = [table.name for space in engine.state.spaces for table in space.tables]
    sums = torch.zeros(len(names), len(PARTS), LANES, dtype=torch.int64)
    done = 0
    for space, row_space in enumerate(engine.state.spaces):
        of_space = sums[done : done + len(row_space.tables)]
        done += len(row_space.tables)
        of_shard = engine.state.layouts[space].data_rows_per_shard
        for first in range(0, of_shard, CHUNK_ROWS):
            engine.check_stop()
            local = torch.arange(first, min(first + CHUNK_ROWS, of_shard))
            for (shard, this), hosted in engine.state.hosted.items():
                if this == space:
                    rows = engine.state.layouts[space].rows_of(shard, local)
                    _add(of_space, row_space, hosted.store, local, rows)
    received = engine.state.transport.exchange({to: [sums]})
    if engine.rank != to:
        return None
    total = torch.stack([tensors(parts)[0].view_as(sums) for parts in received.values()]).sum(0)
    return {name: each.numpy().tobytes().hex() for name, each in zip(names, total, strict=True)}


def _add(sums: Tensor, space: RowSpace, store: Store, local: Tensor, rows: Tensor) -> None:
    """Add the hashes of a shard's `local` rows to `sums`, int64 [tables, parts, LANES].

    `rows` are the numbers of the rows in the space. Rows behind the last table are padding.
    """
    ends = torch.tensor([*space.offsets[1:], space.rows])
    tables = torch.bucketize(rows, ends, right=True)
    for table in tables.unique().tolist():
        if table < len(ends):
            mine = tables == table
            numbers = rows[mine] - space.offsets[table]
            for part, read in enumerate(PARTS):
                values = on_host(read(store, local[mine]))[0]
                sums[table, part] += row_digest(values, numbers)


def table_digests(engine: Engine, to: int) -> dict[str, str] | None:
    """Collective, nothing missing: {table: sha256 of the rows, then of the optimizer state}.

    Rank `to` gets the digests, the remaining ranks `None`. Raises PeerFailure as transport calls
    do, StepAborted after a failure seen by `check_stop`, and StopRequested.
    """
    digests: dict[str, str] = {}
    for space, row_space in enumerate(engine.state.spaces):
        for table, offset in zip(row_space.tables, row_space.offsets, strict=True):
            engine.check_stop()
            digest = hashlib.sha256()
            for part in PARTS:
                for first in range(offset, offset + table.rows, CHUNK_ROWS):
                    rows = torch.arange(first, min(first + CHUNK_ROWS, offset + table.rows))
                    chunk = gather_rows(engine, space, rows, part, to)
                    if chunk is not None:
                        digest.update(chunk.numpy().data)
            digests[table.name] = digest.hexdigest()
    return digests if engine.rank == to else None


def gather_rows(
    engine: Engine, space: int, rows: Tensor, part: Callable[[Store, Tensor], Tensor], to: int
) -> Tensor | None:
    """Collective: `part` of `rows`, int64 [R], on rank `to`, float32 [R, floats]; else `None`.

    `part` is `Store.lookup` or `Store.lookup_state`.
    """
    shards, local = engine.state.layouts[space].locate(rows)
    outgoing: dict[int, list[Part]] = {}
    for (shard, this), hosted in sorted(engine.state.hosted.items()):
        if this == space:
            values = part(hosted.store, local[shards == shard])
            outgoing.setdefault(to, []).extend(((shard,), values))
    received = engine.state.transport.exchange(outgoing)
    if engine.rank != to:
        return None
    chunk: Tensor | None = None
    for parts in received.values():
        for (shard,), values in in_groups(parts, 2):
            here = (shards == shard).nonzero().squeeze(1)
            if here.numel():
                if chunk is None:
                    chunk = torch.empty(rows.numel(), values.numel() // here.numel())
                chunk[here] = values.view(here.numel(), -1)
    return chunk

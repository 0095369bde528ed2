"""SHA-256 of the tables, rows gathered in row order to one rank a chunk at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from ecrm.engine.engine import Engine
from ecrm.storage.base import Store
from ecrm.transport.message import Part, in_groups

CHUNK_ROWS = 65_536


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
            for part in (Store.lookup, Store.lookup_state):
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
    for tensors in received.values():
        for (shard,), values in in_groups(tensors, 2):
            here = (shards == shard).nonzero().squeeze(1)
            if here.numel():
                if chunk is None:
                    chunk = torch.empty(rows.numel(), values.numel() // here.numel())
                chunk[here] = values.view(here.numel(), -1)
    return chunk

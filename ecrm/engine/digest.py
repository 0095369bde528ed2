"""SHA-256 of the tables, rows gathered in row order to one rank a chunk at a time."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ecrm.engine.engine import Engine

CHUNK_ROWS = 65_536


def table_digests(engine: Engine, to: int) -> dict[str, str] | None:
    """Collective, with nothing missing: {table: sha256 of its rows, then its optimizer state, in row order}.

    Rank `to` gets the digests, every other rank None. Raises PeerFailure as transport calls do.
    """
    digests: dict[str, str] = {}
    for space, row_space in enumerate(engine.spaces):
        row_bytes = row_space.dim * 4
        for table, offset in zip(row_space.tables, row_space.offsets, strict=True):
            digest = hashlib.sha256()
            for part in (slice(0, row_bytes), slice(row_bytes, None)):
                for first in range(offset, offset + table.rows, CHUNK_ROWS):
                    rows = torch.arange(first, min(first + CHUNK_ROWS, offset + table.rows))
                    chunk = gather_rows(engine, space, rows, part, to)
                    if chunk is not None:
                        digest.update(chunk.numpy())
            digests[table.name] = digest.hexdigest()
    return digests if engine.rank == to else None


def gather_rows(engine: Engine, space: int, rows: Tensor, part: slice, to: int) -> Tensor | None:
    """Collective: part of the records of `rows`, int64 [R], on rank `to`, uint8 [R, bytes]; None elsewhere."""
    shards, local = engine.layouts[space].locate(rows)
    outgoing: dict[int, list[Tensor]] = {}
    for (shard, this), hosted in sorted(engine.hosted.items()):
        if this == space:
            records = hosted.store.read(local[shards == shard])[:, part].contiguous()
            outgoing.setdefault(to, []).extend((torch.tensor([shard]), records))
    received = engine.transport.exchange(outgoing)
    if engine.rank != to:
        return None
    chunk: Tensor | None = None
    for tensors in received.values():
        for head, records in zip(tensors[::2], tensors[1::2], strict=True):
            here = (shards == int(head[0])).nonzero().squeeze(1)
            if here.numel():
                if chunk is None:
                    chunk = torch.empty(rows.numel(), records.numel() // here.numel(), dtype=torch.uint8)
                chunk[here] = records.view(here.numel(), -1)
    return chunk

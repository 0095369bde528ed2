"""The memory of every rank, as counted by the rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ecrm.transport.base import Transport

MEMORY_KINDS = ("data", "parity", "undo", "dense")


@dataclass(frozen=True)
class Memory:
    """Bytes over all ranks and by rank.

    `data` is rows with optimizer state, `parity` all redundancy, `undo` the logs at their peak,
    `dense` the replicas. Deltas in shared memory count on the owning and on the reading rank. Rows
    and gradients of a step are not counted.
    """

    total: dict[str, int]
    per_rank: list[dict[str, int]]


def gather_memory(transport: Transport, shards: int, held: Sequence[int]) -> Memory:
    """Collective: the memory of all ranks.

    `held` are bytes of this rank in the order of MEMORY_KINDS, `shards` the number of its shards.

    Raises PeerFailure as transport calls do.
    """
    names = ("shards", *MEMORY_KINDS)
    per_rank = [
        {"rank": rank, **dict(zip(names, counts, strict=True))}
        for rank, counts in transport.gather([shards, *held]).items()
    ]
    return Memory({name: sum(rank[name] for rank in per_rank) for name in MEMORY_KINDS}, per_rank)

"""The engine's side of a protection: transport, row layouts and hosted shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ecrm.base.allocate import Allocate, lazy_zeros
from ecrm.placement.stripes import RowLayout
from ecrm.storage.hosted import HostedShard, ShardSpace
from ecrm.transport.base import Transport


@dataclass
class ProtectionContext:
    """Given to a protection by the engine: transport, row layouts and the rank's shards.

    `hosted` is the engine's own map of (shard, row space) to rows; the engine changes the map with
    the view and then calls `adopt`. `record_bytes` is the size of a record of each row space.
    `initial` gives the initial values of rows of a row space, float32 [R, dim]. `committed`, kept
    up to date by the engine, is the number of steps that cannot be taken back.
    """

    transport: Transport
    layouts: tuple[RowLayout, ...]
    record_bytes: tuple[int, ...]
    hosted: dict[ShardSpace, HostedShard] = field(default_factory=dict)
    initial: Callable[[int, Tensor], Tensor] | None = None
    committed: int = 0
    allocate: Allocate = lazy_zeros

"""The view, the map of shards and slots to ranks, and conclusions from a view.

`view_change` makes the next view after ranks have died.

All functions are pure functions of integers; every live rank computes the same view from the same
arguments, so views are never negotiated, only compared by epoch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from ecrm.placement.stripes import StripeShape


@dataclass(frozen=True)
class View:
    """Map of shards and slots to ranks at one epoch.

    `shards[i]` and `slots[i]` are the ranks hosting shard i and slot i; `dense` are the dense
    holders; `rebuilding` the shards with rows possibly missing; `live` all live ranks, spares
    included. Sets are ascending. `domains[rank]` is the failure domain of a rank, live or dead:
    ranks lost together, a single rank or all ranks of a host. `joined` are the ranks that have ever
    joined the run under way, the last to join last.
    """

    epoch: int
    live: tuple[int, ...]
    shards: tuple[int, ...]
    slots: tuple[int, ...]
    dense: tuple[int, ...]
    rebuilding: tuple[int, ...] = ()
    domains: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()

    def shards_of(self, rank: int) -> tuple[int, ...]:
        return tuple(shard for shard, host in enumerate(self.shards) if host == rank)

    def slots_of(self, rank: int) -> tuple[int, ...]:
        return tuple(slot for slot, host in enumerate(self.slots) if host == rank)

    @cached_property
    def live_set(self) -> frozenset[int]:
        """The live ranks."""
        return frozenset(self.live)

    @property
    def spares(self) -> tuple[int, ...]:
        """Live ranks with no shard and no slot."""
        busy = set(self.shards) | set(self.slots)
        return tuple(rank for rank in self.live if rank not in busy)

    @cached_property
    def reporter(self) -> int:
        """The rank to print progress and write the run folder.

        The lowest dense holder that has never joined, or else the dense holder that joined first;
        -1 on a rank that has joined and does not know the view yet.
        """
        joined = {rank: place for place, rank in enumerate(self.joined)}
        return min(self.dense, key=lambda rank: (joined.get(rank, -1), rank), default=-1)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> View:
        fields: dict[str, Any] = json.loads(text)
        epoch = fields.pop("epoch")
        return View(**{key: tuple(value) for key, value in fields.items()}, epoch=epoch)


def dense_holders(view: View, replicas: int) -> tuple[int, ...]:
    """Live ranks to hold the dense replica.

    Live dense holders and all ranks with slots, then the lowest further ranks until `replicas`
    failure domains have a dense replica.
    """
    holders = {rank for rank in view.dense if rank in view.live} | set(view.slots)
    covered = {view.domains[rank] for rank in holders}
    for rank in view.live:
        if len(covered) >= replicas:
            break
        if view.domains[rank] not in covered:
            holders.add(rank)
            covered.add(view.domains[rank])
    return tuple(sorted(holders))


def conflicts(shard: int, rank: int, view: View, shape: StripeShape) -> int:
    """Number of shards of live ranks in `rank`'s failure domain sharing a stripe with `shard`."""
    return sum(
        view.domains[view.shards[other]] == view.domains[rank]
        and view.shards[other] in view.live_set
        for other in shape.sharing_a_stripe(shard)
    )


def keeps_apart(view: View, shape: StripeShape) -> bool:
    """Whether no failure domain holds two members of one stripe."""
    return not any(conflicts(shard, host, view, shape) for shard, host in enumerate(view.shards))


def mark_whole(view: View, shards: Iterable[int]) -> View:
    """The view after `shards` have no missing row left."""
    rebuilding = tuple(shard for shard in view.rebuilding if shard not in set(shards))
    return replace(view, epoch=view.epoch + 1, rebuilding=rebuilding)


def failures_left(view: View, shape: StripeShape, any_shards: bool = False) -> int:
    """Number of further failure domains, any of them, that may be lost at once.

    Everything lost then comes back. With `any_shards` all shards come back.
    """
    rebuilding = set(view.rebuilding)
    tolerated = len({view.domains[rank] for rank in view.live}) - 1
    for residue in range(0 if any_shards else shape.shards):
        members = shape.members(residue)
        budget = shape.m - sum(shard in rebuilding for shard in members)
        units_of = Counter(
            view.domains[view.shards[shard]] for shard in members if shard not in rebuilding
        )
        killed = 0
        for _, units in units_of.most_common():
            budget -= units
            if budget < 0:
                break
            killed += 1
        tolerated = min(tolerated, killed)
    return min(tolerated, len({view.domains[rank] for rank in view.dense}) - 1)

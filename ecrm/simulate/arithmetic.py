"""Plain arithmetic of the promise, independent of the engine's own: what is lost, who sits too close, what could be laid out anew."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import product

from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View

MOST_PLACEMENTS = 3_000
"""Placements that are looked at to find the best one."""


@dataclass(frozen=True)
class Circle:
    """Stripes of k data and m parity units on neighbouring shards of a circle of `shards`."""

    shards: int
    k: int
    m: int

    @staticmethod
    def of(shape: StripeShape) -> Circle:
        return Circle(shape.shards, shape.k, shape.m)

    def stripe(self, first: int) -> set[int]:
        """Shards of every stripe that begins on shard `first`."""
        return {(first + unit) % self.shards for unit in range(self.k + self.m)}

    def most_units_on(self, shards: Collection[int]) -> int:
        """Most units that any stripe has on `shards`."""
        return max(len(self.stripe(first).intersection(shards)) for first in range(self.shards))

    def meet(self, a: int, b: int) -> bool:
        """Whether two shards hold units of one stripe."""
        return a != b and min((a - b) % self.shards, (b - a) % self.shards) < self.k + self.m


def lost_shards(view: View, gone: Collection[int]) -> set[int]:
    """Shards that are rebuilding or hosted by one of `gone`."""
    return {*view.rebuilding, *(shard for shard, host in enumerate(view.shards) if host in gone)}


def neighbours(view: View, circle: Circle, shard: int, rank: int) -> list[int]:
    """Shards in the failure domain of `rank` that hold units of one stripe with `shard`."""
    return [
        other
        for other, host in enumerate(view.shards)
        if circle.meet(shard, other) and view.domains[host] == view.domains[rank]
    ]


def crowded(view: View, circle: Circle) -> list[int]:
    """Shards with another unit of one of their stripes in the same failure domain."""
    return [shard for shard, host in enumerate(view.shards) if neighbours(view, circle, shard, host)]


def meetings(view: View, circle: Circle, shards: Collection[int]) -> int:
    """Pairs of units of a stripe in one failure domain, one of them or both on `shards`."""
    pairs = {frozenset((shard, other)) for shard in shards for other in neighbours(view, circle, shard, view.shards[shard])}
    return len(pairs)


def fewest_meetings(view: View, circle: Circle, shards: Collection[int]) -> int | None:
    """The least that `meetings` could be with `shards` on any live ranks; None where that takes too long to find out."""
    domains = {view.domains[rank]: rank for rank in view.live}
    if len(domains) ** len(shards) > MOST_PLACEMENTS:
        return None
    found = []
    for ranks in product(domains.values(), repeat=len(shards)):
        hosts = list(view.shards)
        for shard, rank in zip(shards, ranks, strict=True):
            hosts[shard] = rank
        found.append(meetings(replace(view, shards=tuple(hosts)), circle, shards))
        if not found[-1]:
            break
    return min(found)


def idle(view: View) -> list[int]:
    """Live ranks without shard and slot."""
    return [rank for rank in view.live if rank not in view.shards and rank not in view.slots]


def widest_k(view: View, circle: Circle) -> int | None:
    """The k of the stripes that the hosts of shards and the idle ranks could be laid out over anew; None: too few are left."""
    domains = {view.domains[rank] for rank in {*view.shards, *idle(view)}}
    k = min(circle.k, len(domains) - circle.m)
    return k if k >= min(circle.k, 2) else None

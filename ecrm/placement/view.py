"""The view: which rank hosts which shard and slot, and how that changes when ranks die.

Everything here is a pure function of integers; every live rank computes the same view from the same
arguments, so views are never negotiated, only compared by epoch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from ecrm.errors import Unrecoverable
from ecrm.placement.stripes import StripeShape


@dataclass(frozen=True)
class View:
    """Map of shards and slots to ranks at one epoch.

    `shards[i]` and `slots[i]` are the ranks hosting shard i and slot i; `dense` the ranks that hold
    the dense replica; `rebuilding` the shards that may still have missing rows; `live` all ranks,
    spares included. All ascending where they are sets. `domains[rank]` is the failure domain of a rank,
    dead ones included: what is lost together, a rank by itself or all ranks of a host.
    """

    epoch: int
    live: tuple[int, ...]
    shards: tuple[int, ...]
    slots: tuple[int, ...]
    dense: tuple[int, ...]
    rebuilding: tuple[int, ...] = ()
    domains: tuple[int, ...] = ()

    def shards_of(self, rank: int) -> tuple[int, ...]:
        return tuple(shard for shard, host in enumerate(self.shards) if host == rank)

    def slots_of(self, rank: int) -> tuple[int, ...]:
        return tuple(slot for slot, host in enumerate(self.slots) if host == rank)

    @property
    def spares(self) -> tuple[int, ...]:
        """Live ranks that host no shard and no slot."""
        busy = set(self.shards) | set(self.slots)
        return tuple(rank for rank in self.live if rank not in busy)

    @property
    def reporter(self) -> int:
        """The rank that prints progress and writes the run folder: the lowest holder of the dense replica."""
        return self.dense[0]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> View:
        return View(**{key: value if key == "epoch" else tuple(value) for key, value in json.loads(text).items()})


def dense_holders(view: View, replicas: int) -> tuple[int, ...]:
    """Live ranks to hold the dense replica: those that do, those that run slots, then the lowest others until
    `replicas` failure domains have one."""
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
    """How many shards of live ranks in `rank`'s failure domain share a stripe with `shard`."""
    return sum(
        shape.share_a_stripe(shard, other)
        for other, host in enumerate(view.shards)
        if other != shard and host in view.live and view.domains[host] == view.domains[rank]
    )


def keeps_apart(view: View, shape: StripeShape) -> bool:
    """Whether no failure domain holds two members of one stripe."""
    return not any(conflicts(shard, host, view, shape) for shard, host in enumerate(view.shards))


def plan_recovery(
    view: View, dead: Iterable[int], shape: StripeShape, dense_replicas: int, protection: str = "protection", any_shards: bool = False
) -> View:
    """The next view after `dead` ranks are gone; messages call what protects the rows `protection`.

    A spare takes over everything its dead rank had, servers first, if that keeps stripe members apart;
    each other shard goes to the live rank that keeps them apart (or, where none can, has the fewest
    conflicts) and has the least to do, each other slot to the rank with the fewest slots. Shards that
    moved are rebuilding. Raises Unrecoverable when a stripe has lost more than m units, unless `any_shards`
    may be lost, or no dense replica is left.
    """
    gone = sorted(set(dead) & set(view.live))
    live = tuple(rank for rank in view.live if rank not in gone)
    named = f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))} died"
    lost = [shard for shard, host in enumerate(view.shards) if host in gone]
    try:
        if not any_shards:
            shape.check_recoverable({*view.rebuilding, *lost})
    except Unrecoverable as error:
        raise Unrecoverable(f"{named}: more was lost than {protection} can bring back: {error}") from None
    if not any(rank in live for rank in view.dense):
        raise Unrecoverable(f"{named}: every replica of the dense model is lost (held by ranks {list(view.dense)})")

    return _handed_on(replace(view, rebuilding=tuple(sorted({*view.rebuilding, *lost}))), gone, shape, dense_replicas)


def plan_rollback(view: View, dead: Iterable[int], shape: StripeShape, dense_replicas: int) -> View:
    """The next view after `dead` ranks are gone and everything is loaded anew: roles move as in `plan_recovery`, nothing is
    rebuilding, and any ranks may be gone but the last."""
    gone = sorted(set(dead) & set(view.live))
    return _handed_on(replace(view, rebuilding=()), gone, shape, dense_replicas)


def _handed_on(view: View, gone: list[int], shape: StripeShape, dense_replicas: int) -> View:
    """The next view, with all that `gone` ranks had on others."""
    live = tuple(rank for rank in view.live if rank not in gone)
    lost = [shard for shard, host in enumerate(view.shards) if host in gone]
    spares = [rank for rank in view.spares if rank in live]
    after = replace(view, epoch=view.epoch + 1, live=live)
    for rank in sorted(gone, key=lambda r: (not view.shards_of(r), r)):
        if spares and (view.shards_of(rank) or view.slots_of(rank)):
            heir = min(spares, key=lambda spare: (_conflicts_of_heir(after, rank, spare, shape), spare))
            if not _conflicts_of_heir(after, rank, heir, shape):
                spares.remove(heir)
                after = _moved(after, rank, heir)
    for shard in lost:
        if after.shards[shard] in gone:
            after = replace(after, shards=_with(after.shards, shard, _shard_heir(shard, after, shape)))
    for slot, host in enumerate(after.slots):
        if host in gone:
            load = Counter(h for h in after.slots if h in live)
            trainers = [rank for rank in live if load[rank]] or list(live)
            after = replace(after, slots=_with(after.slots, slot, min(trainers, key=lambda r: (load[r], r))))
    return replace(after, dense=dense_holders(after, dense_replicas))


def _moved(view: View, rank: int, heir: int) -> View:
    """`view` with all that `rank` hosts on `heir`."""
    return replace(
        view,
        shards=tuple(heir if host == rank else host for host in view.shards),
        slots=tuple(heir if host == rank else host for host in view.slots),
    )


def _with(hosts: tuple[int, ...], number: int, host: int) -> tuple[int, ...]:
    return (*hosts[:number], host, *hosts[number + 1 :])


def _conflicts_of_heir(view: View, rank: int, heir: int, shape: StripeShape) -> int:
    """Stripe conflicts in the failure domain of `heir` if it hosted all that `rank` did."""
    after = _moved(view, rank, heir)
    return sum(conflicts(shard, heir, after, shape) for shard in after.shards_of(heir))


def _shard_heir(shard: int, view: View, shape: StripeShape) -> int:
    """Live rank to adopt a shard: fewest stripe conflicts, then fewest shards, then fewest slots, then lowest rank."""

    def cost(rank: int) -> tuple[int, int, int, int]:
        return conflicts(shard, rank, view, shape), view.shards.count(rank), view.slots.count(rank), rank

    return min(view.live, key=cost)


def mark_whole(view: View, shards: Iterable[int]) -> View:
    """The view after `shards` have no missing row left."""
    rebuilding = tuple(shard for shard in view.rebuilding if shard not in set(shards))
    return replace(view, epoch=view.epoch + 1, rebuilding=rebuilding)


def failures_left(view: View, shape: StripeShape, any_shards: bool = False) -> int:
    """How many more failure domains may be lost at once, whichever they are, without anything being lost that does not come
    back; with `any_shards` that is no shard."""
    rebuilding = set(view.rebuilding)
    tolerated = len({view.domains[rank] for rank in view.live}) - 1
    for residue in range(0 if any_shards else shape.shards):
        members = shape.members(residue)
        budget = shape.m - sum(shard in rebuilding for shard in members)
        units_of = Counter(view.domains[view.shards[shard]] for shard in members if shard not in rebuilding)
        killed = 0
        for _, units in units_of.most_common():
            budget -= units
            if budget < 0:
                break
            killed += 1
        tolerated = min(tolerated, killed)
    return min(tolerated, len({view.domains[rank] for rank in view.dense}) - 1)

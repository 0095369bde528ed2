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
    spares included. All ascending where they are sets.
    """

    epoch: int
    live: tuple[int, ...]
    shards: tuple[int, ...]
    slots: tuple[int, ...]
    dense: tuple[int, ...]
    rebuilding: tuple[int, ...] = ()

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


def initial_view(layout: str, servers: int, trainers: int, spares: int, slots: int, dense_replicas: int) -> View:
    """View of an undisturbed start.

    `dedicated`: ranks 0..servers-1 host a shard each, the next `trainers` run the slots; `colocated`:
    rank i hosts shard i and runs trainer i's slots. Slots go round the trainers. At least
    `dense_replicas` ranks hold the dense replica: the trainers, then others from rank 0 on.
    """
    first_trainer = servers if layout == "dedicated" else 0
    busy = servers + trainers if layout == "dedicated" else max(servers, trainers)
    live = tuple(range(busy + spares))
    slot_hosts = tuple(first_trainer + slot % trainers for slot in range(slots))
    return View(
        epoch=0,
        live=live,
        shards=tuple(range(servers)),
        slots=slot_hosts,
        dense=_dense_holders((), slot_hosts, live, dense_replicas),
    )


def _dense_holders(
    holding: Iterable[int], slots: Iterable[int], live: tuple[int, ...], replicas: int
) -> tuple[int, ...]:
    """Ranks to hold the dense replica: those that do, those that run slots, then the lowest others up to `replicas`."""
    holders = {rank for rank in holding if rank in live} | set(slots)
    for rank in live:
        if len(holders) >= replicas:
            break
        holders.add(rank)
    return tuple(sorted(holders))


def plan_recovery(view: View, dead: Iterable[int], shape: StripeShape, dense_replicas: int) -> View:
    """The next view after `dead` ranks are gone.

    A spare takes over everything its dead rank had, servers first; without spares each shard goes to
    the least loaded survivor that keeps stripe members apart (or, where none can, to the one with the
    fewest conflicts), each slot to the survivor with the fewest slots. Shards that moved are rebuilding.
    Raises Unrecoverable when a stripe has lost more than m units, or no dense replica is left.
    """
    gone = sorted(set(dead) & set(view.live))
    live = tuple(rank for rank in view.live if rank not in gone)
    named = f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))} died"
    lost = [shard for shard, host in enumerate(view.shards) if host in gone]
    try:
        shape.check_recoverable({*view.rebuilding, *lost})
    except Unrecoverable as error:
        protection = f"erasure k={shape.k} m={shape.m}" if shape.m else "protection none"
        raise Unrecoverable(f"{named}: more was lost than {protection} can bring back: {error}") from None
    if not any(rank in live for rank in view.dense):
        raise Unrecoverable(f"{named}: every replica of the dense model is lost (held by ranks {list(view.dense)})")

    shards, slots = list(view.shards), list(view.slots)
    spares = [rank for rank in view.spares if rank in live]
    for rank in sorted(gone, key=lambda r: (not view.shards_of(r), r)):
        roles = view.shards_of(rank) or view.slots_of(rank)
        if not roles or not spares:
            continue
        heir = spares.pop(0)
        shards = [heir if host == rank else host for host in shards]
        slots = [heir if host == rank else host for host in slots]
    for shard in lost:
        if shards[shard] in gone:
            shards[shard] = _shard_heir(shard, shards, slots, live, shape)
    for slot, host in enumerate(slots):
        if host in gone:
            load = Counter(h for h in slots if h in live)
            trainers = [rank for rank in live if load[rank]] or list(live)
            slots[slot] = min(trainers, key=lambda r: (load[r], r))
    return replace(
        view,
        epoch=view.epoch + 1,
        live=live,
        shards=tuple(shards),
        slots=tuple(slots),
        dense=_dense_holders(view.dense, slots, live, dense_replicas),
        rebuilding=tuple(sorted({*view.rebuilding, *lost})),
    )


def _shard_heir(shard: int, shards: list[int], slots: list[int], live: tuple[int, ...], shape: StripeShape) -> int:
    """Survivor to adopt a shard: fewest stripe conflicts, then fewest shards, then fewest slots, then lowest rank."""

    def cost(rank: int) -> tuple[int, int, int, int]:
        hosted = [other for other, host in enumerate(shards) if host == rank]
        conflicts = sum(shape.share_a_stripe(shard, other) for other in hosted)
        return conflicts, len(hosted), slots.count(rank), rank

    return min(live, key=cost)


def mark_whole(view: View, shards: Iterable[int]) -> View:
    """The view after `shards` have no missing row left."""
    rebuilding = tuple(shard for shard in view.rebuilding if shard not in set(shards))
    return replace(view, epoch=view.epoch + 1, rebuilding=rebuilding)


def failures_left(view: View, shape: StripeShape) -> int:
    """How many more ranks may die at once, whichever they are, without anything being lost."""
    rebuilding = set(view.rebuilding)
    tolerated = len(view.live) - 1
    for residue in range(shape.shards):
        members = shape.members(residue)
        budget = shape.m - sum(shard in rebuilding for shard in members)
        per_rank = Counter(view.shards[shard] for shard in members if shard not in rebuilding)
        killed = 0
        for _, units in per_rank.most_common():
            budget -= units
            if budget < 0:
                break
            killed += 1
        tolerated = min(tolerated, killed)
    return min(tolerated, len(view.dense) - 1)

"""The next view after ranks have died: who inherits their roles. All survivors find the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ecrm.base.wording import named
from ecrm.errors import Unrecoverable
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View, conflicts, dense_holders

MOST_TRIES = 5_000
"""Placements of a shard that `least_conflicts` tries before it takes the best that it has found."""


def plan_recovery(
    view: View,
    dead: Iterable[int],
    shape: StripeShape,
    dense_replicas: int,
    protection: str = "protection",
    any_shards: bool = False,
    may_move: bool = True,
) -> View:
    """The next view after `dead` ranks are gone; messages call what protects the rows `protection`.

    A spare takes over everything its dead rank had, servers first, if that keeps stripe members
    apart; each other shard goes to the live rank that keeps them apart and has the least to do,
    each other slot to the rank with the fewest slots. Where that puts members together, shards find
    hosts together by `least_conflicts`, those that are rebuilding already too if they `may_move`.
    Shards that moved are rebuilding. Raises Unrecoverable when a stripe has lost more than m units,
    unless `any_shards` may be lost, or no dense replica is left.
    """
    gone = sorted(set(dead) & set(view.live))
    live = tuple(rank for rank in view.live if rank not in gone)
    who = f"{named('rank', gone)} died"
    lost = [shard for shard, host in enumerate(view.shards) if host in gone]
    try:
        if not any_shards:
            shape.check_recoverable({*view.rebuilding, *lost})
    except Unrecoverable as error:
        raise Unrecoverable(
            f"{who}: more was lost than {protection} can bring back: {error}"
        ) from None
    if not any(rank in live for rank in view.dense):
        raise Unrecoverable(
            f"{who}: every replica of the dense model is lost (held by ranks {list(view.dense)})"
        )
    rebuilding = tuple(sorted({*view.rebuilding, *lost}))
    return _handed_on(
        replace(view, rebuilding=rebuilding),
        gone,
        shape,
        dense_replicas,
        rebuilding if may_move else lost,
    )


def plan_rollback(view: View, dead: Iterable[int], shape: StripeShape, dense_replicas: int) -> View:
    """The next view after `dead` ranks are gone and everything is loaded anew.

    Roles move as in `plan_recovery`, and nothing is rebuilding. Any ranks may be gone but the last.
    """
    gone = sorted(set(dead) & set(view.live))
    lost = [shard for shard, host in enumerate(view.shards) if host in gone]
    return _handed_on(replace(view, rebuilding=()), gone, shape, dense_replicas, lost)


def _handed_on(
    view: View, gone: list[int], shape: StripeShape, dense_replicas: int, movable: Sequence[int]
) -> View:
    """The next view, with all that `gone` ranks had on others.

    Of the shards of others only `movable` ones move.
    """
    live = tuple(rank for rank in view.live if rank not in gone)
    view = replace(view, epoch=view.epoch + 1, live=live)
    after = _one_by_one(view, gone, shape)
    hosts = least_conflicts(after, movable, shape)
    if hosts != after.shards:
        after = _spares_take_over(replace(view, shards=hosts), view, gone, shape)
    for slot, host in enumerate(after.slots):
        if host in gone:
            load = Counter(h for h in after.slots if h in live)
            trainers = [rank for rank in live if load[rank]] or list(live)
            after = replace(
                after, slots=_with(after.slots, slot, min(trainers, key=lambda r: (load[r], r)))
            )
    return replace(after, dense=dense_holders(after, dense_replicas))


def _servers_first(view: View, gone: Iterable[int]) -> list[int]:
    return sorted(gone, key=lambda rank: (not view.shards_of(rank), rank))


def _one_by_one(view: View, gone: list[int], shape: StripeShape) -> View:
    """`view` with spares in the place of dead ranks where that keeps stripe members apart.

    The shards that are left go, one after the other, where they share stripes with the fewest.
    """
    after, spares = view, list(view.spares)
    for rank in _servers_first(view, gone):
        if spares and (view.shards_of(rank) or view.slots_of(rank)):
            heir = min(
                spares,
                key=lambda spare: (_conflicts_of_heir(after, view, rank, spare, shape), spare),
            )
            if not _conflicts_of_heir(after, view, rank, heir, shape):
                spares.remove(heir)
                after = _moved(after, view, rank, heir)
    for shard, host in enumerate(view.shards):
        if host in gone and after.shards[shard] in gone:
            after = replace(
                after, shards=_with(after.shards, shard, _shard_heir(shard, after, shape))
            )
    return after


def _spares_take_over(after: View, view: View, gone: list[int], shape: StripeShape) -> View:
    """`after` with all that a dead rank had in `view` on one free spare.

    Only where that keeps stripe members apart. In `after` shards have found hosts.
    """

    def heirs_of(shards: Iterable[int]) -> set[int]:
        return {view.shards[shard] for shard in shards}

    for rank in _servers_first(view, gone):
        shards, slots = view.shards_of(rank), view.slots_of(rank)
        heirs = {after.shards[shard] for shard in shards}
        own = [
            heir
            for heir in sorted(heirs.intersection(view.spares))
            if not after.slots_of(heir) and heirs_of(after.shards_of(heir)) == {rank}
        ]
        if len(heirs) > 1 or not own:
            own += after.spares
        heir = next(
            (spare for spare in own if not _conflicts_of_heir(after, view, rank, spare, shape)),
            None,
        )
        if heir is not None and (shards or slots):
            after = _moved(after, view, rank, heir)
    return after


def least_conflicts(view: View, movable: Sequence[int], shape: StripeShape) -> tuple[int, ...]:
    """Hosts of all shards, `movable` ones on any live ranks, with as few conflicts as can be.

    A conflict is a pair of units of a stripe in one failure domain, one of them of a movable shard.
    The hosts of `view` stay where they are as good.

    Tries all placements, those with the fewest conflicts so far first; after MOST_TRIES it takes
    the best found.
    """
    near = {shard: shape.sharing_a_stripe(shard) for shard in movable}
    hosts: list[int | None] = list(view.shards)
    best, best_hosts = _pairs(movable, near, view.shards, view), view.shards
    tries = 0
    shards_of, slots_of = (
        Counter(host for shard, host in enumerate(hosts) if shard not in near),
        Counter(view.slots),
    )
    for shard in movable:
        hosts[shard] = None

    def around(shard: int) -> Counter[int]:
        """How many members of the shard's stripes are in each failure domain."""
        return Counter(
            view.domains[host] for other in near[shard] if (host := hosts[other]) is not None
        )

    def place(left: frozenset[int], pairs: int) -> None:
        nonlocal tries, best, best_hosts
        if not left:
            best, best_hosts = pairs, tuple(host for host in hosts if host is not None)
            return
        meets = {shard: around(shard) for shard in left}
        shard = max(left, key=lambda s: (len(meets[s]), -s))
        # by failure domain: its other ranks are no better
        best_of: dict[int, tuple[int, bool, int, int, int]] = {}
        for rank in view.live:
            domain = view.domains[rank]
            cost = (
                meets[shard][domain],
                rank != view.shards[shard],
                shards_of[rank],
                slots_of[rank],
                rank,
            )
            best_of[domain] = min(cost, best_of.get(domain, cost))
        for more, *_, rank in sorted(best_of.values()):
            if pairs + more >= best or tries >= MOST_TRIES:
                return
            tries += 1
            hosts[shard], shards_of[rank] = rank, shards_of[rank] + 1
            place(left - {shard}, pairs + more)
            hosts[shard], shards_of[rank] = None, shards_of[rank] - 1

    if best:
        place(frozenset(movable), 0)
    return best_hosts


def _pairs(
    movable: Sequence[int], near: dict[int, set[int]], hosts: Sequence[int], view: View
) -> int:
    """Pairs of units of a stripe in one failure domain that a movable shard belongs to."""
    return sum(
        view.domains[hosts[shard]] == view.domains[hosts[other]]
        and (other not in near or shard < other)
        for shard in movable
        for other in near[shard]
    )


def _moved(after: View, view: View, rank: int, heir: int) -> View:
    """`after` with all that `rank` had in `view` on `heir`."""
    return replace(
        after,
        shards=tuple(
            heir if had == rank else host
            for had, host in zip(view.shards, after.shards, strict=True)
        ),
        slots=tuple(
            heir if had == rank else host for had, host in zip(view.slots, after.slots, strict=True)
        ),
    )


def _with(hosts: tuple[int, ...], number: int, host: int) -> tuple[int, ...]:
    return (*hosts[:number], host, *hosts[number + 1 :])


def _conflicts_of_heir(after: View, view: View, rank: int, heir: int, shape: StripeShape) -> int:
    """Stripe conflicts in the domain of `heir` if it hosted all that `rank` did in `view`."""
    moved = _moved(after, view, rank, heir)
    return sum(conflicts(shard, heir, moved, shape) for shard in moved.shards_of(heir))


def _shard_heir(shard: int, view: View, shape: StripeShape) -> int:
    """Live rank to adopt a shard: fewest stripe conflicts, then shards, then slots, lowest rank."""

    def cost(rank: int) -> tuple[int, int, int, int]:
        return (
            conflicts(shard, rank, view, shape),
            view.shards.count(rank),
            view.slots.count(rank),
            rank,
        )

    return min(view.live, key=cost)

"""The next view after ranks have died, with heirs for the roles. All survivors find the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ecrm.base.wording import named
from ecrm.errors import Unrecoverable
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View, conflicts, dense_holders

MOST_TRIES = 5_000
"""Placements of a shard tried by `least_conflicts`, before the best found is taken."""


def plan_recovery(
    view: View,
    dead: Iterable[int],
    shape: StripeShape,
    dense_replicas: int,
    protection: str = "protection",
    any_shards: bool = False,
    may_move: bool = True,
) -> View:
    """The next view after `dead` ranks are gone; `protection` is a name for messages.

    A spare takes over all roles of a dead rank, servers first, if stripe members stay apart. A
    remaining shard goes to the live rank with the fewest stripe conflicts, then the least to do; a
    remaining slot to the trainer with the fewest slots. If stripe members meet on the way,
    `least_conflicts` places the lost shards anew, with `may_move` also shards rebuilding already.
    Moved shards are rebuilding. Raises Unrecoverable if a stripe has lost more than m units, unless
    `any_shards` may be lost, or if no dense replica is left.
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

    Roles move as in `plan_recovery`, and nothing is rebuilding. At least one rank must be left.
    """
    gone = sorted(set(dead) & set(view.live))
    lost = [shard for shard, host in enumerate(view.shards) if host in gone]
    return _handed_on(replace(view, rebuilding=()), gone, shape, dense_replicas, lost)


def _handed_on(
    view: View, gone: list[int], shape: StripeShape, dense_replicas: int, movable: Sequence[int]
) -> View:
    """The next view, with all roles of `gone` ranks on live ranks.

    Of the shards of live ranks only `movable` shards move.
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
    """`view` with spares in the place of dead ranks if stripe members stay apart.

    Every remaining shard goes in turn to the rank with the fewest stripe conflicts.
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
    """`after` with all roles of a dead rank in `view` on one free spare.

    Only if stripe members stay apart. In `after` all shards have found hosts.
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
    """Hosts of all shards with the fewest conflicts, `movable` shards on any live ranks.

    A conflict is a pair of shards sharing a stripe in one failure domain, with at least one shard
    movable. The hosts of `view` stay if as good.

    Tries all placements, with the fewest conflicts so far first; after MOST_TRIES takes the best
    found.
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
        """Number of hosted shards sharing a stripe with the shard, by failure domain."""
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
        # the best rank by failure domain: no other rank of the domain is better
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
    """Number of pairs of shards sharing a stripe in one failure domain, at least one movable."""
    return sum(
        view.domains[hosts[shard]] == view.domains[hosts[other]]
        and (other not in near or shard < other)
        for shard in movable
        for other in near[shard]
    )


def _moved(after: View, view: View, rank: int, heir: int) -> View:
    """`after` with all roles of `rank` in `view` on `heir`."""
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
    """Stripe conflicts of the shards of `heir`, after `heir` took all roles of `rank` in `view`."""
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

"""The next view after ranks have died or joined. All live ranks find the same.

Roles of the dead go to heirs. A rank that joins gets slots that doubled up, or is a spare.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ecrm.base.errors import Unrecoverable
from ecrm.base.wording import named
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View, dense_holders

MOST_TRIES = 5_000
"""Placements of a shard tried by `least_conflicts` for up to FEW shards, before the best is taken.

For more shards the number of tries is smaller in proportion: the time stays the same.
"""
FEW = 8


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

    A spare takes over all roles of a dead rank, servers first, if stripe members stay apart. Free
    spares then take a part of the shards of a rank with several. A remaining shard goes to the live
    rank with the fewest stripe conflicts, then the least to do; a remaining slot to the trainer
    with the fewest slots. If stripe members meet on the way, `least_conflicts` places the lost
    shards anew, with `may_move` also shards rebuilding already. Moved shards are rebuilding. Raises
    Unrecoverable if a stripe has lost more than m units, unless `any_shards` may be lost, or if no
    dense replica is left.
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


def plan_join(view: View, joined: Iterable[int], first: View, dense_replicas: int) -> View:
    """The next view with `joined` ranks; `first` is the view at the undisturbed start.

    A rank that joins is a spare. But as long as fewer ranks have slots than at the start, the rank
    gets its share of the slots of the rank with most slots. Ranks with slots at the start come
    first. Shards move later, by `plan_reshape`.
    """
    new = sorted(set(joined) - set(view.live), key=lambda rank: (not first.slots_of(rank), rank))
    live = tuple(sorted((*view.live, *new)))
    slots = list(view.slots)
    for rank in new:
        load = Counter(slots)
        if len(load) >= len(set(first.slots)):
            break
        donor = max(load, key=lambda host: (load[host], -host))
        theirs = [slot for slot, host in enumerate(slots) if host == donor]
        # the higher half: a donor with a single slot keeps the slot
        for slot in theirs[-(-len(theirs) // 2) :]:
            slots[slot] = rank
    after = replace(
        view,
        epoch=view.epoch + 1,
        live=live,
        slots=tuple(slots),
        joined=(*(rank for rank in view.joined if rank not in new), *sorted(new)),
    )
    return replace(after, dense=dense_holders(after, dense_replicas))


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
    slots = _slots_handed_on(after.slots, set(gone), live)
    after = _spares_share(replace(after, slots=slots), view, gone, shape)
    return replace(after, dense=dense_holders(after, dense_replicas))


def _slots_handed_on(
    slots: tuple[int, ...], gone: set[int], live: Sequence[int]
) -> tuple[int, ...]:
    """Hosts of the slots: a slot of a `gone` rank goes to the trainer with the fewest slots.

    Without any trainer left, all slots go to the lowest live rank.
    """
    load = Counter(host for host in slots if host not in gone)
    trainers = [(count, rank) for rank, count in load.items()] or [(0, min(live))]
    heapq.heapify(trainers)
    after = list(slots)
    for slot, host in enumerate(slots):
        if host in gone:
            count, heir = trainers[0]
            after[slot] = heir
            heapq.heapreplace(trainers, (count + 1, heir))
    return tuple(after)


class _Load:
    """The number of shards and slots of live ranks, and the rank to choose in each domain.

    A rank with fewer shards comes first, then with fewer slots, then the lowest.
    """

    def __init__(self, view: View, shards: Iterable[int], slots: Iterable[int]) -> None:
        self._shards, self._slots = Counter(shards), Counter(slots)
        self._domains = view.domains
        self._ranks: dict[int, list[int]] = defaultdict(list)
        for rank in view.live:
            self._ranks[view.domains[rank]].append(rank)
        self.least = {domain: self._least(domain) for domain in self._ranks}
        """By domain: (number of shards, number of slots, rank) of the rank to choose."""

    def of(self, rank: int) -> tuple[int, int, int]:
        """Number of shards, number of slots, and the rank."""
        return self._shards[rank], self._slots[rank], rank

    def add(self, rank: int, shards: int = 1) -> None:
        """Count further shards of a rank."""
        self._shards[rank] += shards
        domain = self._domains[rank]
        self.least[domain] = self._least(domain)

    def _least(self, domain: int) -> tuple[int, int, int]:
        return min(map(self.of, self._ranks[domain]))


def _hosted(hosts: Iterable[int]) -> dict[int, list[int]]:
    """The numbers of shards, or of slots, by host, ascending."""
    found: dict[int, list[int]] = defaultdict(list)
    for number, host in enumerate(hosts):
        found[host].append(number)
    return found


def _servers_first(gone: Iterable[int], shards: dict[int, list[int]]) -> list[int]:
    return sorted(gone, key=lambda rank: (rank not in shards, rank))


def _one_by_one(view: View, gone: list[int], shape: StripeShape) -> View:
    """`view` with spares in the place of dead ranks if stripe members stay apart.

    Every remaining shard goes in turn to the rank with the fewest stripe conflicts.
    """
    after, spares = view, list(view.spares)
    shards, slots = _hosted(view.shards), _hosted(view.slots)
    for rank in _servers_first(gone, shards):
        if spares and (rank in shards or rank in slots):
            # the conflicts are the same for all spares of a domain
            first = {after.domains[spare]: spare for spare in sorted(spares, reverse=True)}
            met, heir = min(
                (_conflicts_of_heir(after, shards.get(rank, ()), spare, (), shape), spare)
                for spare in first.values()
            )
            if not met:
                spares.remove(heir)
                after = _moved(after, view, rank, heir)
    return _adopted(after, set(gone), shape)


def _adopted(view: View, gone: set[int], shape: StripeShape) -> View:
    """`view` with every shard of a `gone` rank on the live rank with the fewest stripe conflicts.

    Of ranks with equally few: the rank with the fewest shards, then slots, then the lowest.
    """
    hosts = list(view.shards)
    load = _Load(view, hosts, view.slots)
    for shard, host in enumerate(view.shards):
        if host in gone:
            met = Counter(
                view.domains[hosts[other]]
                for other in shape.sharing_a_stripe(shard)
                if hosts[other] not in gone
            )
            *_, heir = min((met[domain], *least) for domain, least in load.least.items())
            hosts[shard] = heir
            load.add(heir)
    return replace(view, shards=tuple(hosts))


def _spares_take_over(after: View, view: View, gone: list[int], shape: StripeShape) -> View:
    """`after` with all roles of a dead rank in `view` on one free spare.

    Only if stripe members stay apart. In `after` all shards have found hosts.
    """
    shards_before, slots_before = _hosted(view.shards), _hosted(view.slots)
    spares_before = set(view.spares)
    shards_now, slots_now = _hosted(after.shards), _hosted(after.slots)
    for rank in _servers_first(gone, shards_before):
        shards = shards_before.get(rank, [])
        if not shards and rank not in slots_before:
            continue
        heirs = {after.shards[shard] for shard in shards}
        own = [
            heir
            for heir in sorted(heirs & spares_before)
            if heir not in slots_now and {view.shards[one] for one in shards_now[heir]} == {rank}
        ]
        if len(heirs) > 1 or not own:
            own += after.spares
        heir = next(
            (
                spare
                for spare in own
                if not _conflicts_of_heir(after, shards, spare, shards_now.get(spare, ()), shape)
            ),
            None,
        )
        if heir is not None:
            after = _moved(after, view, rank, heir)
            shards_now, slots_now = _hosted(after.shards), _hosted(after.slots)
    return after


def _spares_share(after: View, view: View, gone: list[int], shape: StripeShape) -> View:
    """`after` with the shards of `gone` ranks in `view` on more spares, so more ranks rebuild.

    The first spares alone take part, as many as are ready for a takeover: a pair for each death. A
    free spare gets a shard from the spare with the most, if stripe members stay apart and neither
    then has two shards more than the other.
    """
    hosts, ready = list(after.shards), view.spares[: 2 * shape.m]
    lost: dict[int, list[int]] = defaultdict(list)
    for shard, host in enumerate(view.shards):
        if host in gone:
            lost[hosts[shard]].append(shard)
    free = [spare for spare in ready if spare in after.spares]
    for spare in free:
        while True:
            most = max(ready, key=lambda rank: (len(lost[rank]), -rank))
            if len(lost[most]) - len(lost[spare]) < 2:
                break
            apart = [
                shard
                for shard in lost[most]
                if all(
                    after.domains[hosts[other]] != after.domains[spare]
                    for other in shape.sharing_a_stripe(shard)
                )
            ]
            if not apart:
                break
            lost[most].remove(apart[-1])
            lost[spare].append(apart[-1])
            hosts[apart[-1]] = spare
    return replace(after, shards=tuple(hosts))


def least_conflicts(view: View, movable: Sequence[int], shape: StripeShape) -> tuple[int, ...]:
    """Hosts of all shards with the fewest conflicts, `movable` shards on any live ranks.

    A conflict is a pair of shards sharing a stripe in one failure domain, with at least one shard
    movable. The hosts of `view` stay if as good.

    Tries all placements, with the fewest conflicts so far first; after MOST_TRIES takes the best
    found.
    """
    near = {shard: shape.sharing_a_stripe(shard) for shard in movable}
    best, best_hosts = _pairs(movable, near, view.shards, view), view.shards
    if not best:
        return best_hosts
    domains, hosts = view.domains, list(view.shards)
    live = set(view.live)
    load = _Load(view, (host for shard, host in enumerate(hosts) if shard not in near), view.slots)
    # by shard still to be placed: the number of shards sharing a stripe with it, by domain
    meets = {
        shard: Counter(domains[hosts[other]] for other in others if other not in near)
        for shard, others in near.items()
    }
    left, tries = set(movable), MOST_TRIES * FEW // max(FEW, len(movable))

    def choices(shard: int) -> list[tuple[int, bool, int, int, int]]:
        """The best rank of each domain, best first: no other rank of the domain is better."""
        met, present = meets[shard], view.shards[shard]
        costs = {domain: (met[domain], True, *least) for domain, least in load.least.items()}
        if present in live:
            costs[domains[present]] = (met[domains[present]], False, *load.of(present))
        return sorted(costs.values())

    def place(pairs: int) -> None:
        nonlocal tries, best, best_hosts
        if not left:
            best, best_hosts = pairs, tuple(hosts)
            return
        shard = max(left, key=lambda each: (len(meets[each]), -each))
        left.remove(shard)
        others = [meets[other] for other in near[shard] if other in left]
        for more, *_, rank in choices(shard):
            if pairs + more >= best or not tries:
                break
            tries -= 1
            hosts[shard], domain = rank, domains[rank]
            load.add(rank)
            for met in others:
                met[domain] += 1
            place(pairs + more)
            for met in others:
                met[domain] -= 1
                if not met[domain]:
                    del met[domain]
            load.add(rank, -1)
        left.add(shard)

    place(0)
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


def _conflicts_of_heir(
    view: View, moved: Sequence[int], heir: int, own: Sequence[int], shape: StripeShape
) -> int:
    """Stripe conflicts of the shards of `heir`, with the `moved` shards besides its `own`."""
    domains, live, mine = view.domains, view.live_set, {*moved, *own}
    return sum(
        other in mine
        or (domains[view.shards[other]] == domains[heir] and view.shards[other] in live)
        for shard in mine
        for other in shape.sharing_a_stripe(shard)
    )

"""The roles of ranks at the undisturbed start, and the spread of shards over failure domains.

Shards are spread anew when the ranks left can no longer keep the members of a stripe apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View, dense_holders, keeps_apart


class CannotKeepApart(Exception):
    """The ranks cannot keep the members of a stripe in different failure domains."""


def initial_view(
    layout: str,
    shape: StripeShape,
    trainers: int,
    spares: int,
    slots: int,
    dense_replicas: int,
    domains: Sequence[int] | None = None,
    shards_per_server: int = 1,
) -> View:
    """View of an undisturbed start.

    `domains[rank]` is the failure domain of a rank, by default the rank itself.

    `dedicated`: servers host `shards_per_server` shards each, `trainers` further ranks run the
    slots; `colocated`: the host of shard i runs trainer i's slots. The circle of shards goes
    several times round the servers, so shards are apart as with a shard each. If every rank is a
    domain of its own, servers and then trainers are on ranks 0, 1, 2, ... in order. Slots rotate
    over the trainers. At least `dense_replicas` domains hold the dense replica: the trainers'
    domains, then further domains. Raises CannotKeepApart.
    """
    servers = shape.shards // shards_per_server
    world = (servers + trainers if layout == "dedicated" else max(servers, trainers)) + spares
    domains = tuple(range(world)) if domains is None else tuple(domains)
    hosts = spread_shards(replace(shape, shards=servers), range(world), domains)
    idle = [rank for rank in range(world) if rank not in hosts]
    running = list(hosts[:trainers]) if layout == "colocated" else []
    load = dict.fromkeys(domains, 0)
    for rank in (*hosts, *running):
        load[domains[rank]] += 1
    while len(running) < trainers:
        rank = min(idle, key=lambda r: (load[domains[r]], r))
        idle.remove(rank)
        load[domains[rank]] += 1
        running.append(rank)
    view = View(
        epoch=0,
        live=tuple(range(world)),
        shards=hosts * shards_per_server,
        slots=tuple(running[slot % trainers] for slot in range(slots)),
        dense=(),
        domains=domains,
    )
    return replace(view, dense=dense_holders(view, dense_replicas))


def spread_shards(
    shape: StripeShape, ranks: Sequence[int], domains: Mapping[int, int] | Sequence[int]
) -> tuple[int, ...]:
    """A rank for each shard, no rank twice, members of a stripe in different failure domains.

    Two shards share a stripe if fewer than k + m apart on the circle of shards. The circle is cut
    into the fewest arcs, equal to within one shard, with no more shards in an arc than domains.
    Shard p of every arc goes to the p-th largest domain, so shards of a domain are at least an arc
    apart. No placement needs fewer domains; a placement with better use of domains of unequal size
    may exist. Raises CannotKeepApart.
    """
    by_domain: dict[int, list[int]] = {}
    for rank in ranks:
        by_domain.setdefault(domains[rank], []).append(rank)
    largest_first = sorted(by_domain.values(), key=lambda members: (-len(members), members[0]))
    arcs = -(-shape.shards // len(largest_first)) if largest_first else shape.shards
    if arcs > 1 and shape.shards // arcs < shape.width:
        raise CannotKeepApart(
            f"{shape.shards} shards with stripes of {shape.k}+{shape.m} units need at least "
            f"{_domains_needed(shape)} failure domains, there are {len(largest_first)}"
        )
    places: list[int] = []
    for arc in range(arcs):
        length = shape.shards // arcs + (arc < shape.shards % arcs)
        for place in range(length):
            if not largest_first[place]:
                raise CannotKeepApart(
                    f"{shape.shards} shards over {len(largest_first)} failure domains: "
                    f"{arcs} ranks are needed in each of the first {length}"
                )
            places.append(largest_first[place].pop(0))
    return tuple(places)


def _domains_needed(shape: StripeShape) -> int:
    """Fewest failure domains for keeping the members of every stripe apart."""
    return -(-shape.shards // (shape.shards // shape.width))


def plan_reshape(
    view: View, shape: StripeShape, first: View, first_shape: StripeShape
) -> tuple[StripeShape, View] | None:
    """Stripes and view with members apart again, on the present hosts and the spares.

    `first` and `first_shape` are those of the undisturbed start. The largest k up to the first k,
    with the same m, then the most shards. `None` if m is 0, or if fewer than m + 2 ranks (or
    failure domains) are left for stripes; for k = 1, fewer than m + 1. If members are apart
    already, `None` before a rank has joined. Afterwards a plan has a larger k, or more shards up to
    the first number, or shards that doubled up go to spares.
    """
    apart = keeps_apart(view, shape)
    if not shape.m or (apart and not view.joined):
        return None
    ranks = _able_to_host(view, first)
    most = min(len(ranks), first_shape.shards) if apart else len(ranks)
    present = (shape.k, shape.shards) if apart else (0, 0)
    for k in range(min(first_shape.k, len(ranks) - shape.m), min(first_shape.k, 2) - 1, -1):
        for shards in range(most, k + shape.m - 1, -1):
            if (k, shards) <= present:
                return _relieved(view, shape, ranks)
            other = StripeShape(shards, k, shape.m)
            try:
                hosts = spread_shards(other, ranks, view.domains)
            except CannotKeepApart:
                continue
            return other, replace(view, epoch=view.epoch + 1, shards=hosts)
    return _relieved(view, shape, ranks) if apart else None


def _able_to_host(view: View, first: View) -> list[int]:
    """The ranks for shards: present hosts, and spares.

    If trainers host shards at the start, also ranks that have joined.
    """
    together = set(first.shards) & set(first.slots)
    joined = view.live_set.intersection(view.joined if together else ())
    return sorted({*view.shards, *view.spares, *joined})


def _relieved(
    view: View, shape: StripeShape, ranks: Sequence[int]
) -> tuple[StripeShape, View] | None:
    """The same stripes, with shards that doubled up on ranks without a shard, members apart.

    `None` if no shard can move.
    """
    after = view
    for shard, host in enumerate(view.shards):
        idle = [rank for rank in ranks if rank not in after.shards]
        if after.shards.count(host) < 2 or not idle:
            continue
        for rank in idle:
            hosts = (*after.shards[:shard], rank, *after.shards[shard + 1 :])
            moved = replace(after, shards=hosts)
            if keeps_apart(moved, shape):
                after = moved
                break
    return None if after is view else (shape, replace(after, epoch=view.epoch + 1))

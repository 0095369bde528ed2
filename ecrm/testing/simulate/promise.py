"""The promise in plain arithmetic, independent of the engine's arithmetic.

The functions compute places of rows, parity, lost shards, units of a stripe in one failure domain,
possible stripes over the remaining ranks, and the ranks that may die now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, product

from ecrm.engine.engine import Engine
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View
from ecrm.protection.kinds import KINDS
from ecrm.testing.simulate.plain_stripes import PlainStripes
from ecrm.testing.simulate.workload import Workload

ROLLING_BACK = tuple(kind.name for kind in KINDS.values() if kind.rolls_back)
"""Protections that take all ranks back to files, after any number of deaths."""

MOST_PLACEMENTS = 3_000
"""Most placements compared in a search for the best placement."""


@dataclass(frozen=True)
class Circle(PlainStripes):
    """Stripes, and which shards may be lost."""

    @staticmethod
    def of(shape: StripeShape) -> Circle:
        return Circle(shape.shards, shape.k, shape.m)

    def most_units_on(self, shards: Collection[int]) -> int:
        """The largest number of units of a stripe on `shards`, over all stripes."""
        return max(len(self.stripe(first).intersection(shards)) for first in range(self.shards))

    def meet(self, a: int, b: int) -> bool:
        """Whether shards a and b hold units of the same stripe."""
        return a != b and min((a - b) % self.shards, (b - a) % self.shards) < self.k + self.m


def lost_shards(view: View, gone: Collection[int]) -> set[int]:
    """Rebuilding shards, and shards hosted by the ranks `gone`."""
    return {*view.rebuilding, *(shard for shard, host in enumerate(view.shards) if host in gone)}


def neighbours(view: View, circle: Circle, shard: int, rank: int) -> list[int]:
    """Shards in the failure domain of `rank` with units of the same stripe as `shard`."""
    return [
        other
        for other, host in enumerate(view.shards)
        if circle.meet(shard, other) and view.domains[host] == view.domains[rank]
    ]


def crowded(view: View, circle: Circle) -> list[int]:
    """Shards sharing a failure domain with a second unit of the same stripe."""
    return [
        shard for shard, host in enumerate(view.shards) if neighbours(view, circle, shard, host)
    ]


def meetings(view: View, circle: Circle, shards: Collection[int]) -> int:
    """The number of pairs of units of a stripe in one failure domain, with a unit on `shards`."""
    pairs = {
        frozenset((shard, other))
        for shard in shards
        for other in neighbours(view, circle, shard, view.shards[shard])
    }
    return len(pairs)


def fewest_meetings(view: View, circle: Circle, shards: Collection[int]) -> int | None:
    """The smallest number of `meetings` over all placements of `shards` in live failure domains.

    `None` for more than MOST_PLACEMENTS placements.
    """
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


def deaths_survived(view: View, circle: Circle) -> int:
    """The number of failure domains that may die at once, in any combination.

    No stripe then loses more than m units, and a dense replica is left.
    """
    domains = {view.domains[rank] for rank in view.live}
    survived = 0
    while True:
        for dying in combinations(sorted(domains), survived + 1):
            gone = [rank for rank in view.live if view.domains[rank] in dying]
            if (
                set(view.dense).issubset(gone)
                or circle.most_units_on(lost_shards(view, gone)) > circle.m
            ):
                return survived
        survived += 1


def idle(view: View) -> list[int]:
    """Live ranks without shard and slot."""
    return [rank for rank in view.live if rank not in view.shards and rank not in view.slots]


def servers_left(view: View, together: bool) -> set[int]:
    """Ranks able to host shards after a reshape: hosts of shards, and idle ranks.

    With trainers and servers `together`, also live ranks that have joined.
    """
    joined = set(view.joined).intersection(view.live) if together else ()
    return {*view.shards, *idle(view), *joined}


def widest_k(view: View, circle: Circle, together: bool = False) -> int | None:
    """The k of stripes reshaped over `servers_left`; `None` with too few failure domains."""
    domains = {view.domains[rank] for rank in servers_left(view, together)}
    k = min(circle.k, len(domains) - circle.m)
    return k if k >= min(circle.k, 2) else None


class Violation(BaseException):
    """A promise of the design does not hold.

    The base is not Exception, because an engine would take an Exception for its own failure.
    """


def _too_many_since_commit(engine: Engine, gone: set[int], m: int) -> bool:
    """Whether a shard is lost, and more than m failure domains died since a commit of a step.

    The dead domains may have held all copies of a row.
    """
    domains = {engine.view.domains[rank] for rank in gone.intersection(engine.state.live_at_commit)}
    return bool(lost_shards(engine.view, gone)) and len(domains) > m


def survivable(
    workload: Workload, engines: Mapping[int, Engine], dead: Iterable[int], victim: int
) -> bool:
    """Whether the run must survive the death of `victim` now, after the deaths of `dead`.

    `engines` are the engines of live ranks; a rank before its start has no engine. Ranks may have
    different views. By every view, no stripe may have lost more than m units. Protections that roll
    back, and stateless servers, may lose any number of units. A holder of the dense replica must be
    left.
    """
    gone = {*dead, victim}
    start = workload.initial_view()
    stood = {
        (engine.view, Circle.of(engine.state.protection.shape))
        for rank, engine in engines.items()
        if rank not in gone
    }
    for view, circle in stood or {(start, Circle(len(start.shards), workload.k, workload.m))}:
        units_left = (
            workload.kind.rolls_back
            or not workload.kind.exact
            or circle.most_units_on(lost_shards(view, gone)) <= workload.m
        )
        if gone.issuperset(view.live) or not units_left:
            return False
    if workload.kind.copies_at_slots and any(
        _too_many_since_commit(engine, gone, workload.m) for engine in engines.values()
    ):
        return False
    holders = {rank for rank, engine in engines.items() if engine.state.dense is not None}
    missing_engines = set(start.dense) - set(engines)
    return bool((holders | missing_engines) - gone)


def exact_without(workload: Workload, engines: Mapping[int, Engine], victim: int) -> bool:
    """Whether the model keeps the bits of the undisturbed run after the death of `victim`.

    Stateless servers replace the rows of a lost shard by older values, so the bits change.
    """
    views = [engine.view for engine in engines.values()] or [workload.initial_view()]
    return workload.kind.exact or all(victim not in view.shards for view in views)

"""The promise in plain arithmetic, independent of the engine's own.

Where rows lie, what parity is, what is lost, which units are too close, what stripes are possible
over the ranks that are left, and which rank may die now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, product

import numpy as np

from ecrm.engine.engine import Engine
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View
from ecrm.protection.kinds import KINDS
from ecrm.testing.simulate.workload import Workload

ROLLING_BACK = tuple(kind.name for kind in KINDS.values() if kind.rolls_back)
"""Protections with which all go back to files, however many have died."""

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

    def rows_on(self, shard: int, rows: int) -> np.ndarray:
        """Row numbers of a shard's local data rows, int64 [R], in a row space of `rows` rows.

        Those past its end are padding.
        """
        unit = np.arange(self.k)
        return (self._periods(rows) + (shard - self.m - unit) % self.shards) * self.k + unit

    def parity_on(self, shard: int, rows: int) -> np.ndarray:
        """Stripes of a shard's local parity rows, int64 [R].

        Local row r is parity `r % m` of its stripe.
        """
        return self._periods(rows) + (shard - np.arange(self.m)) % self.shards

    def _periods(self, rows: int) -> np.ndarray:
        return self.shards * np.arange(-(-rows // (self.k * self.shards)))[:, None]

    def parity(self, records: np.ndarray, t: int) -> np.ndarray:
        """Parity t of all stripes, uint8 [stripes, B], of records uint8 [rows, B]."""
        stripes = self._periods(len(records)).size * self.shards
        data = np.zeros((stripes * self.k, records.shape[1]), np.uint8)
        data[: len(records)] = records
        units = data.reshape(stripes, self.k, -1)
        parity: np.ndarray = np.bitwise_xor.reduce(
            [_multiples(_coefficient(self.k, self.m, t, d))[units[:, d]] for d in range(self.k)]
        )
        return parity

    def most_units_on(self, shards: Collection[int]) -> int:
        """Most units that any stripe has on `shards`."""
        return max(len(self.stripe(first).intersection(shards)) for first in range(self.shards))

    def meet(self, a: int, b: int) -> bool:
        """Whether two shards hold units of one stripe."""
        return a != b and min((a - b) % self.shards, (b - a) % self.shards) < self.k + self.m


def _times(a: int, b: int) -> int:
    """The product in GF(2^8) with polynomial 0x11d, bit by bit."""
    product = 0
    while b:
        product ^= a * (b & 1)
        a, b = (a << 1) ^ (0x11D * (a >> 7)), b >> 1
    return product


def _coefficient(k: int, m: int, t: int, d: int) -> int:
    """What data unit d of k is multiplied by in parity t of m.

    That is (2^t)^d, or with m > 3 the inverse of (k + t) XOR d.
    """
    if m > 3:
        return next(one for one in range(1, 256) if _times(one, (k + t) ^ d) == 1)
    power = 1
    for _ in range(t * d):
        power = _times(power, 2)
    return power


@lru_cache
def _multiples(factor: int) -> np.ndarray:
    """uint8 [256]: the products of every byte."""
    return np.array([_times(byte, factor) for byte in range(256)], np.uint8)


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
    return [
        shard for shard, host in enumerate(view.shards) if neighbours(view, circle, shard, host)
    ]


def meetings(view: View, circle: Circle, shards: Collection[int]) -> int:
    """Pairs of units of a stripe in one failure domain, one of them or both on `shards`."""
    pairs = {
        frozenset((shard, other))
        for shard in shards
        for other in neighbours(view, circle, shard, view.shards[shard])
    }
    return len(pairs)


def fewest_meetings(view: View, circle: Circle, shards: Collection[int]) -> int | None:
    """The least that `meetings` could be with `shards` on any live ranks.

    None where that takes too long to find out.
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
    """How many failure domains may die at once, whichever they are.

    Then no stripe loses more than m units, and a dense replica is left.
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


def servers_left(view: View) -> set[int]:
    """Ranks that everything could be laid out anew over: the hosts of shards and the idle ones."""
    return {*view.shards, *idle(view)}


def widest_k(view: View, circle: Circle) -> int | None:
    """The k of stripes over the `servers_left`; None where too few are left."""
    domains = {view.domains[rank] for rank in servers_left(view)}
    k = min(circle.k, len(domains) - circle.m)
    return k if k >= min(circle.k, 2) else None


class Violation(BaseException):
    """Something that the design promises does not hold.

    Not an Exception, so that no engine takes it for a failure of its own.
    """


def _too_many_since_commit(engine: Engine, gone: set[int], m: int) -> bool:
    """Whether a shard is lost, and more than m failure domains since a commit of a step.

    They may have held all copies of a row.
    """
    domains = {engine.view.domains[rank] for rank in gone.intersection(engine.state.live_at_commit)}
    return bool(lost_shards(engine.view, gone)) and len(domains) > m


def survivable(
    workload: Workload, engines: Mapping[int, Engine], dead: Iterable[int], victim: int
) -> bool:
    """Whether the run must survive `victim` dying now, `dead` having died before.

    `engines` are those of live ranks that have got as far as having one. Ranks may stand at
    different views; by each of them no stripe may have lost more than m units (stateless, and where
    all go back to files: any number), and a copy of the dense replica must be left.
    """
    gone = {*dead, victim}
    start = workload.initial_view()
    stood = {
        (engine.view, Circle.of(engine.state.protection.shape))
        for rank, engine in engines.items()
        if rank not in gone
    }
    for view, circle in stood or {(start, Circle(workload.servers, workload.k, workload.m))}:
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
    """Whether the bits stay those of the undisturbed run when `victim` dies.

    Stateless servers that lose a shard go on with others.
    """
    views = [engine.view for engine in engines.values()] or [workload.initial_view()]
    return workload.kind.exact or all(victim not in view.shards for view in views)

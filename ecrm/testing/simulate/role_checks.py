"""Checks of views, by plain arithmetic.

All ranks have the same view, and members of a stripe are apart. Spares get roles before busy ranks,
and a due reshape comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ecrm.engine.engine import Engine
from ecrm.placement.view import View
from ecrm.testing.simulate.promise import (
    Circle,
    Violation,
    crowded,
    deaths_survived,
    fewest_meetings,
    idle,
    lost_shards,
    meetings,
    neighbours,
    servers_left,
    widest_k,
)


class Roles:
    """Checks the views of all ranks; `reshapes` is whether the policy makes due reshapes.

    `first` are the stripes at the start, if known: stripes grow again, up to these, after ranks
    have joined.
    `together` is whether ranks with slots host shards at the start.

    `unsearched` counts recoveries with crowded units of a stripe and too many placements to search
    for a better placement.
    """

    def __init__(self, reshapes: bool, first: Circle | None, together: bool) -> None:
        self._reshapes, self._first, self._together = reshapes, first, together
        self.unsearched = 0
        self._good: set[tuple[View, Circle]] = set()
        self._by_epoch: dict[int, View] = {}
        self._before_reshape: dict[int, tuple[View, Circle]] = {}

    def at_phase(self, rank: int, engine: Engine, phase: str) -> None:
        """A phase begins on a rank."""
        if phase == "reshape":
            self._before_reshape[rank] = engine.view, Circle.of(engine.state.protection.shape)
        elif phase == "rollback":
            self._before_reshape.pop(rank, None)
        elif phase == "recover":
            self._by_epoch[engine.view.epoch] = engine.view
        elif phase == "lookup" and engine.step == engine.committed:
            self._nothing_is_due(engine)

    def joined(self, rank: int) -> None:
        """Forget the views of a rank that has died and has joined with a new engine."""
        self._before_reshape.pop(rank, None)

    def check(self, engines: Mapping[int, Engine]) -> None:
        """Raise Violation unless ranks of equal epochs have equal and valid views.

        The live ranks of a later view are live in all earlier views, or have joined.
        """
        views: dict[int, View] = {}
        for rank, engine in engines.items():
            view = views.setdefault(engine.view.epoch, engine.view)
            if view != engine.view:
                raise Violation(
                    f"rank {rank} has another view of epoch {view.epoch}: {engine.view} and {view}"
                )
            self._check_one(view, Circle.of(engine.state.protection.shape), engine)
        live: set[int] | None = None
        for epoch in sorted(views):
            if live is not None and not live.issuperset(
                set(views[epoch].live).difference(views[epoch].joined)
            ):
                raise Violation(
                    f"the view of epoch {epoch} counts ranks {views[epoch].live} as live, "
                    f"an earlier one {sorted(live)}"
                )
            live = set(views[epoch].live)

    def after_recovery(self, engines: Mapping[int, Engine]) -> None:
        """Check views after a recovery: all ranks have the same view, and spares went first."""
        self.check(engines)
        if len({engine.view for engine in engines.values()}) > 1:
            views = {rank: engine.view for rank, engine in engines.items()}
            raise Violation(f"after a recovery ranks have different views: {views}")
        engine = next(iter(engines.values()))
        view = self._by_epoch[engine.view.epoch] = engine.view
        before = self._by_epoch.get(view.epoch - 1)
        if before is None or len(before.shards) != len(view.shards):
            return
        more = set(view.rebuilding).difference(
            lost_shards(before, set(before.live).difference(view.live))
        )
        if more:
            raise Violation(
                f"shards {sorted(more)} rebuild though nothing of them was lost: "
                f"{before} then {view}"
            )
        if set(before.live).issubset(view.live):
            return  # ranks have joined, and no role was handed on by the dead
        circle = Circle.of(engine.state.protection.shape)
        check_spares_first(before, view, circle)
        self.unsearched += not check_apart(
            before, view, circle, engine.state.protection.rebuilding_may_move
        )

    def after_commit(self, rank: int, engine: Engine) -> bool:
        """Check the stripes of a rank after a commit; return whether the commit was a reshape."""
        self._by_epoch[engine.view.epoch] = engine.view
        now = Circle.of(engine.state.protection.shape)
        view, circle = self._before_reshape.get(rank, (engine.view, now))
        if now == circle:
            return False
        del self._before_reshape[rank]
        if now.m != circle.m or now.k != self._widest(view, circle) or crowded(engine.view, now):
            raise Violation(
                f"rank {rank}: {circle} was laid out anew as {now} in {engine.view}, before {view}"
            )
        servers = servers_left(view, self._together)
        least = len({view.domains[server] for server in servers})
        # a layout with members apart grows up to the first number of shards alone
        if not crowded(view, circle):
            least = min(least, (self._first or circle).shards)
        if not least <= now.shards <= len(servers):
            raise Violation(
                f"rank {rank}: laid out anew as {now}, "
                f"though servers {sorted(servers)} are left: {view}"
            )
        return True

    def _check_one(self, view: View, circle: Circle, engine: Engine) -> None:
        """Raise Violation unless live ranks have all roles, and `failures_left` is right.

        m + 1 failure domains hold the dense replica; with fewer domains, all domains do.
        """
        if (view, circle) in self._good:
            return
        astray = {*view.shards, *view.slots, *view.dense}.difference(view.live)
        if astray:
            raise Violation(f"ranks {sorted(astray)} have roles and are not live: {view}")
        there, holding = (
            {view.domains[rank] for rank in ranks} for ranks in (view.live, view.dense)
        )
        if len(holding) < min(circle.m + 1, len(there)):
            raise Violation(
                f"{len(holding)} failure domains hold the dense replica, m={circle.m}: {view}"
            )
        if (
            circle.m
            and not engine.state.protection.kind.copies_at_slots
            and engine.state.failures_left != deaths_survived(view, circle)
        ):
            raise Violation(
                f"{engine.state.failures_left} more may die, it says, "
                f"{deaths_survived(view, circle)} may: {view}, {circle}"
            )
        self._good.add((view, circle))

    def _nothing_is_due(self, engine: Engine) -> None:
        """Raise Violation if a step begins at a commit although a possible reshape is due.

        A reshape is due when members of a stripe share a failure domain and no shard rebuilds, and
        when stripes can be wider again after ranks have joined.
        """
        view, circle = engine.view, Circle.of(engine.state.protection.shape)
        widest = self._widest(view, circle)
        if (
            self._reshapes
            and circle.m
            and not view.rebuilding
            and widest is not None
            and (crowded(view, circle) or widest > circle.k)
        ):
            raise Violation(
                f"step {engine.step} begins on {view} "
                f"though it could be laid out anew with k={widest}"
            )

    def _widest(self, view: View, circle: Circle) -> int | None:
        return widest_k(view, self._first or circle, self._together)


def check_apart(before: View, after: View, circle: Circle, rebuilding_may_move: bool) -> bool:
    """Raise Violation if a better placement would let fewer units of a stripe share a domain.

    The placements move the shards of dead ranks, and rebuilding shards if `rebuilding_may_move`.
    Returns whether the placements were few enough to compare them all.
    """
    handed_on = {shard for shard, host in enumerate(before.shards) if host not in after.live}
    if rebuilding_may_move:
        handed_on |= set(before.rebuilding).intersection(after.rebuilding)
    found = meetings(after, circle, handed_on)
    # shards do not move to ranks that join: the next reshape moves shards
    had = replace(after, live=tuple(sorted(set(before.live).intersection(after.live))))
    fewest = fewest_meetings(had, circle, sorted(handed_on)) if found else 0
    if fewest is not None and found > fewest:
        raise Violation(
            f"shards {sorted(handed_on)} were handed on so that {found} pairs of units "
            f"of a stripe share a failure domain, though {fewest} would do: "
            f"{before} then {after}, {circle}"
        )
    return fewest is not None


def check_spares_first(before: View, after: View, circle: Circle) -> None:
    """Raise Violation if a busy rank got a role of a dead rank while a fitting spare waits.

    A spare fits if the spare could have taken all shards of the dead rank. A rank that has handed
    on all its own roles is not busy.
    """
    waiting = set(idle(before)).intersection(idle(after))
    busy = {
        rank
        for rank in after.live
        if {*before.shards_of(rank)} & {*after.shards_of(rank)}
        or {*before.slots_of(rank)} & {*after.slots_of(rank)}
    }
    for rank in set(before.live).difference(after.live):
        shards, slots = before.shards_of(rank), before.slots_of(rank)
        heirs = {after.shards[shard] for shard in shards} | {after.slots[slot] for slot in slots}
        for spare in waiting if heirs & busy else ():
            if not any(neighbours(after, circle, shard, spare) for shard in shards) and not any(
                circle.meet(a, b) for a in shards for b in shards
            ):
                raise Violation(
                    f"ranks {sorted(heirs & busy)} got roles of rank {rank} "
                    f"while spare {spare} waits: {before} then {after}"
                )

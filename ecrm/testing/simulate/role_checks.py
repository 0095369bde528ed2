"""What must hold of views, by plain arithmetic.

All ranks have the same view, stripe members are apart, spares go first, and a due reshape comes.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    """Watches the views of all ranks; `reshapes` says whether the policy is to reshape when due.

    `unsearched` counts recoveries that crowded a stripe's units where that could not be compared
    with all placements.
    """

    def __init__(self, reshapes: bool) -> None:
        self._reshapes = reshapes
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

    def check(self, engines: Mapping[int, Engine]) -> None:
        """At any commit: equal epochs have equal views, and members are apart.

        Later views have no rank that earlier ones have not.
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
            if live is not None and not live.issuperset(views[epoch].live):
                raise Violation(
                    f"the view of epoch {epoch} counts ranks {views[epoch].live} as live, "
                    f"an earlier one {sorted(live)}"
                )
            live = set(views[epoch].live)

    def after_recovery(self, engines: Mapping[int, Engine]) -> None:
        """A recovery is through on all ranks: they have one view, and spares have gone first."""
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
        circle = Circle.of(engine.state.protection.shape)
        check_spares_first(before, view, circle)
        self.unsearched += not check_apart(
            before, view, circle, engine.state.protection.rebuilding_may_move
        )

    def after_commit(self, rank: int, engine: Engine) -> bool:
        """A rank has accepted a commit; whether it was that of a reshape."""
        self._by_epoch[engine.view.epoch] = engine.view
        now = Circle.of(engine.state.protection.shape)
        view, circle = self._before_reshape.get(rank, (engine.view, now))
        if now == circle:
            return False
        del self._before_reshape[rank]
        if now.m != circle.m or now.k != widest_k(view, circle) or crowded(engine.view, now):
            raise Violation(
                f"rank {rank}: {circle} was laid out anew as {now} in {engine.view}, before {view}"
            )
        servers = servers_left(view)
        if not len({view.domains[server] for server in servers}) <= now.shards <= len(servers):
            raise Violation(
                f"rank {rank}: laid out anew as {now}, "
                f"though servers {sorted(servers)} are left: {view}"
            )
        return True

    def _check_one(self, view: View, circle: Circle, engine: Engine) -> None:
        """Live ranks have the roles, and the run says rightly how many more may die.

        m + 1 failure domains hold the dense replica, where there are as many.
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
        """A step begins at a commit: no reshape that the ranks left would allow is due.

        One is due where members are not apart and nothing is rebuilding.
        """
        view, circle = engine.view, Circle.of(engine.state.protection.shape)
        if (
            self._reshapes
            and circle.m
            and not view.rebuilding
            and crowded(view, circle)
            and widest_k(view, circle) is not None
        ):
            raise Violation(
                f"step {engine.step} begins on {view} "
                f"though it could be laid out anew with k={widest_k(view, circle)}"
            )


def check_apart(before: View, after: View, circle: Circle, rebuilding_may_move: bool) -> bool:
    """Check that as few units of a stripe as possible share a failure domain.

    This is of shards that dead ranks had, and those that were rebuilding, where they may move, all
    placed together. Returns whether all placements could be compared.
    """
    handed_on = {shard for shard, host in enumerate(before.shards) if host not in after.live}
    if rebuilding_may_move:
        handed_on |= set(before.rebuilding).intersection(after.rebuilding)
    found = meetings(after, circle, handed_on)
    fewest = fewest_meetings(after, circle, sorted(handed_on)) if found else 0
    if fewest is not None and found > fewest:
        raise Violation(
            f"shards {sorted(handed_on)} were handed on so that {found} pairs of units "
            f"of a stripe share a failure domain, though {fewest} would do: "
            f"{before} then {after}, {circle}"
        )
    return fewest is not None


def check_spares_first(before: View, after: View, circle: Circle) -> None:
    """No role of a dead rank went to a busy one while a spare waits.

    Only a spare that could have taken all that the dead rank had counts.
    """
    waiting = set(idle(before)).intersection(idle(after))
    busy = set(after.live).difference(idle(before))
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

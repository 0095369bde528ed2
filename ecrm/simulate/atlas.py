"""Which rank may die now: the promise, by plain arithmetic on every live rank's view, so that only promised faults are injected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ecrm.engine.engine import Engine
from ecrm.simulate.promise import Circle, lost_shards
from ecrm.simulate.workload import Workload


def _too_many_since_commit(engine: Engine, gone: set[int], m: int) -> bool:
    """Whether a shard is lost, and as many failure domains since a commit of a step as may have held all copies of a row."""
    domains = {engine.view.domains[rank] for rank in gone.intersection(engine.live_at_commit)}
    return bool(lost_shards(engine.view, gone)) and len(domains) > m


def survivable(
    workload: Workload, engines: Mapping[int, Engine], dead: Iterable[int], victim: int
) -> bool:
    """Whether the run must survive `victim` dying now, `dead` having died before.

    `engines` are those of live ranks that have got as far as having one. Ranks may stand at
    different views; by each of them no stripe may have lost more than m units (stateless: any
    number), and a copy of the dense replica must be left.
    """
    gone = {*dead, victim}
    start = workload.initial_view()
    stood = {
        (engine.view, Circle.of(engine.protection.shape))
        for rank, engine in engines.items()
        if rank not in gone
    }
    for view, circle in stood or {(start, Circle(workload.servers, workload.k, workload.m))}:
        units_left = (
            workload.protection == "stateless"
            or circle.most_units_on(lost_shards(view, gone)) <= workload.m
        )
        if gone.issuperset(view.live) or not units_left:
            return False
    if workload.protection == "replicate" and any(
        _too_many_since_commit(engine, gone, workload.m) for engine in engines.values()
    ):
        return False
    holders = {rank for rank, engine in engines.items() if engine.dense is not None}
    missing_engines = set(start.dense) - set(engines)
    return bool((holders | missing_engines) - gone)

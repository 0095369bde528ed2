"""Which rank may die now: the promise, asked of every live rank's own view, so that only promised faults are injected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ecrm.engine.engine import Engine
from ecrm.errors import Unrecoverable
from ecrm.placement.view import plan_recovery
from ecrm.simulate.workload import Workload


def survivable(workload: Workload, engines: Mapping[int, Engine], dead: Iterable[int], victim: int) -> bool:
    """Whether the run must survive `victim` dying now, `dead` having died before.

    `engines` are those of live ranks that have got as far as having one. Ranks may stand at different
    views; the death must be survivable from each of them, and leave a copy of the dense replica.
    """
    gone = {*dead, victim}
    start = workload.initial_view()
    views = {(engine.view, engine.protection.shape) for rank, engine in engines.items() if rank not in gone}
    for view, shape in views or {(start, workload.make_protection().shape)}:
        lost = gone.intersection(view.live)
        if lost == set(view.live):
            return False
        try:
            plan_recovery(view, lost, shape, shape.m + 1)
        except Unrecoverable:
            return False
    holders = {rank for rank, engine in engines.items() if engine.dense is not None}
    missing_engines = set(start.dense) - set(engines)
    return bool((holders | missing_engines) - gone)

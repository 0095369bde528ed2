"""What writes the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Callable

from ecrm.base.console import say
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.rank.build_rank import Rank
from ecrm.rank.claim import ClaimedRun
from ecrm.rank.collective_check import on_one_rank


def checkpoints_of(
    run: ClaimedRun,
    rank: Rank,
    evaluations: Callable[[int], list[list[float | None]]] = lambda step: [],
) -> Checkpoints | None:
    """What writes the checkpoints of a run, None where it has none.

    `evaluations(step)` are those before a step, to be kept with them.
    """
    config, own, loaded = run.config, run.durable.own, run.durable.loaded
    if own is None or not (config.checkpoints or config.checkpoint.at_end):
        return None
    return Checkpoints(
        rank.engine,
        own,
        run.start.identity,
        CheckpointPolicy(run.start.steps, **vars(config.checkpoint)),
        rank.reporter.event,
        # no checkpoint of the step that mapped files go on from
        first=0 if run.start.mapped is not None else None,
        not_finite=rank.watch.checkpoint,
        evaluations=evaluations,
        began_from=None if loaded is None else loaded.path,
    )


def inherit_best(run: ClaimedRun, rank: Rank) -> None:
    """Collective: let `best` lead where it does beside the checkpoint that the run goes on from."""
    own, loaded = run.durable.own, run.durable.loaded
    if own is None or loaded is None:
        return
    left_behind = on_one_rank(rank.transport, lambda: own.inherit_best(loaded))
    if left_behind and rank.transport.rank == rank.transport.live[0]:
        say(left_behind)

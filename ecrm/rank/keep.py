"""What writes the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Callable

from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.rank.build_rank import Rank
from ecrm.rank.claim import ClaimedRun


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

"""Make the writer of a run's checkpoints."""

from __future__ import annotations

from ecrm.base.console import say
from ecrm.checkpoint.folder import CheckpointFolder
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.run.build_rank import Rank
from ecrm.run.claim import RunContext
from ecrm.run.gather import decide


def checkpoint_folder(run: RunContext) -> CheckpointFolder | None:
    """The folder for a run's checkpoints, `None` for a run without checkpoints."""
    writes = run.config.checkpoints or run.config.checkpoint.at_end
    return run.durable.own if writes else None


def checkpoints_of(run: RunContext, rank: Rank) -> Checkpoints | None:
    """The writer of a run's checkpoints, `None` for a run without checkpoints."""
    config, own, loaded = run.config, checkpoint_folder(run), run.durable.loaded
    if own is None:
        return None
    return Checkpoints(
        rank.engine,
        own,
        run.start.identity,
        CheckpointPolicy(run.start.steps, **vars(config.checkpoint)),
        rank.reporter.event,
        # the step from which mapped files go on has no checkpoint
        first=_first(run, rank),
        not_finite=rank.watch.checkpoint,
        began_from=None if loaded is None else loaded.path,
    )


def _first(run: RunContext, rank: Rank) -> int | None:
    """The step from which the run began, if not the engine's; see `Checkpoints`."""
    if rank.transport.joined and run.start.checkpoints:
        return run.start.checkpoints[0].step
    return 0 if run.start.mapped is not None or rank.transport.joined else None


def inherit_best(run: RunContext, rank: Rank) -> None:
    """Collective: point `best` at the best checkpoint of the run from which this run goes on.

    A best model of other data is left behind.
    """
    own, loaded = run.durable.own, run.durable.loaded
    if own is None or loaded is None:
        return
    if loaded.manifest.identity.get("data_began", 0) != run.start.data_began:
        return
    left_behind = decide(rank.transport, lambda: own.inherit_best(loaded))
    if left_behind and rank.transport.rank == rank.transport.live[0]:
        say(left_behind)

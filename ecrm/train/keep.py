"""The records kept by a run: the history of its evaluations, and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from ecrm.checkpoint.compatibility import HELD_OUT
from ecrm.checkpoint.folder import Checkpoint
from ecrm.checkpoint.keeper import Checkpoints
from ecrm.run.build_rank import Rank
from ecrm.run.claim import ClaimedRun
from ecrm.run.keep import checkpoints_of, inherit_best
from ecrm.train.history import History


@dataclass(frozen=True)
class Kept:
    """The evaluations of a run so far, and its `Checkpoints`, `None` if the run writes none."""

    history: History
    checkpoints: Checkpoints | None


def keep(run: ClaimedRun, rank: Rank) -> Kept:
    """Collective: begin the records of a run, continuing the loaded checkpoint, if any."""
    loaded = run.durable.loaded
    history = _history(run, loaded)
    return Kept(history, _checkpoints(run, rank, loaded, history))


def _goes_on_measured(run: ClaimedRun, loaded: Checkpoint) -> bool:
    """Whether the evaluations in a checkpoint used the samples held out by the run."""
    return all(
        loaded.manifest.identity.get(key) == run.start.identity[key] for key in ("data", HELD_OUT)
    )


def _history(run: ClaimedRun, loaded: Checkpoint | None) -> History:
    by = "logloss" if run.config.checkpoint.keep_best == "logloss" else "auc"
    if loaded is None or not _goes_on_measured(run, loaded):
        return History(by)
    return History(by, loaded.manifest.evaluations)


def _checkpoints(
    run: ClaimedRun, rank: Rank, loaded: Checkpoint | None, history: History
) -> Checkpoints | None:
    checkpoints = checkpoints_of(run, rank, history.to_json)
    keeps_best = checkpoints is not None and run.config.checkpoint.keep_best != "none"
    if keeps_best and loaded is not None and _goes_on_measured(run, loaded):
        inherit_best(run, rank)
    return checkpoints

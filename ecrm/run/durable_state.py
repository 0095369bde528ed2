"""The model of a run on disk: checkpoints or mapped files, to go on from and to write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ecrm.base.console import say
from ecrm.checkpoint.folder import FOLDER as CHECKPOINTS
from ecrm.checkpoint.folder import Checkpoint, CheckpointFolder
from ecrm.checkpoint.lost_rows import CheckpointRows
from ecrm.checkpoint.mapped_restore import Reopened
from ecrm.checkpoint.restore import Restorer
from ecrm.config.schema import Config
from ecrm.engine.rollback import Durable
from ecrm.run.plan import Start


@dataclass(frozen=True)
class DurableState:
    """A run's model on disk: checkpoints or mapped files, to restore and to write.

    `own` are the run's own checkpoints, `None` without a run folder. `rows` reads the rows of
    single shards. `tier` restores the whole model, `None` for a run unable to roll back; `in_words`
    describes `tier`, empty without a tier.
    """

    own: CheckpointFolder | None
    rows: CheckpointRows
    tier: Durable | None
    in_words: str

    @property
    def loaded(self) -> Checkpoint | None:
        """The checkpoint last loaded by `tier`."""
        return self.tier.loaded if isinstance(self.tier, Restorer) else None

    def newest(self) -> int:
        """The step of the newest checkpoint of this run, 0 without any."""
        return self.own.newest() if self.own is not None else 0


def durable_state(config: Config, run_dir: Path | None, start: Start) -> DurableState:
    """The state on disk, by the config and the starting point. Opens no file."""
    own = CheckpointFolder(run_dir / CHECKPOINTS) if run_dir is not None else None
    begins_with = start.begins_with
    rows = CheckpointRows(
        own,
        [checkpoint.path for checkpoint in start.checkpoints],
        None if begins_with is None else begins_with.path,
    )
    if start.mapped is not None:
        return DurableState(own, rows, Reopened(), "the last commit in the mapped files")
    if not (config.checkpoints or start.checkpoints or begins_with is not None):
        return DurableState(own, rows, None, "")
    restorer = Restorer(own, start.checkpoints, say, start.identity, begins_with)
    return DurableState(own, rows, restorer, "a checkpoint")

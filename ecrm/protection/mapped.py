"""State in memory-mapped files: after a failure all ranks go back to the commit in the files.

Ranks hold no copies for other ranks.

After Wood et al., "Towards Fast Crash-Consistent Cluster Checkpointing" (HPEC 2022; PyMM). Rows and
optimizer state live in files and are updated there (`shard_file.py` in the folder `mapped_files`).
The dense state is written beside the last commit (`dense_file.py`). Every rank opens the files of
the shards it hosts, so no rank has anything to load. The promise is the undisturbed model, bit for
bit, for as long as the files exist.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from ecrm.base.allocate import Allocate
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View
from ecrm.protection.context import ProtectionContext
from ecrm.protection.kinds import KINDS
from ecrm.protection.mapped_files.dense_file import DenseFile
from ecrm.protection.mapped_files.shard_file import ShardFile
from ecrm.protection.none import NoProtection
from ecrm.storage.hosted import ShardSpace


class MappedProtection(NoProtection):
    """`files` of the rank's shards, in a `folder` seen by every rank.

    With `durable`, a commit is on the device before the agreement, and survives the death of the
    machine. Without `durable`, a commit survives only the death of the processes.
    """

    kind = KINDS["mapped"]

    def __init__(self, shards: int, folder: Path, durable: bool) -> None:
        super().__init__(shards)
        self.folder, self.durable = folder, durable
        self.files: dict[ShardSpace, ShardFile] = {}
        self._dense: DenseFile | None = None
        self._committed = self._prepared = 0
        self._written_before = 0  # by the rank's protection before a rollback

    @property
    def after_deaths(self) -> str:
        return "all rows are in the mapped files, as of the last commit"

    @property
    def written_bytes(self) -> int:
        dense = 0 if self._dense is None else self._dense.written_bytes
        return (
            self._written_before + dense + sum(file.written_bytes for file in self.files.values())
        )

    @property
    def log_bytes(self) -> int:
        return sum(file.journal_bytes for file in self.files.values())

    def with_shape(self, shape: StripeShape) -> MappedProtection:
        again = MappedProtection(shape.shards, self.folder, self.durable)
        again._written_before = self.written_bytes
        return again

    def allocator(self, shard: int, space: int) -> Allocate:
        self.files[shard, space] = ShardFile(
            self.folder, f"shard{shard}-space{space}", self.durable
        )
        return self.files[shard, space].allocate

    def start(self, context: ProtectionContext, view: View) -> None:
        self._rank = context.transport.rank
        for key, hosted in context.hosted.items():
            hosted.journal = self.files[key].note

    def prepare(self, step: int, dense: Callable[[], list[Tensor]] | None) -> None:
        if step == self._committed:
            return
        for file in self.files.values():
            file.prepare(step)
        if dense is not None:
            if self._dense is None:
                self._dense = DenseFile(self.folder, f"rank{self._rank}", self.durable)
            self._dense.keep(step, dense(), self._committed)
        self._prepared = step

    def committed(self) -> None:
        if self._prepared == self._committed:
            return
        for file in self.files.values():
            file.commit(self._prepared)
        self._committed = self._prepared

    def stands_at(self, step: int) -> None:
        """The files have been brought to commit `step`."""
        self._committed = self._prepared = step

"""The rows of a lost shard from the newest valid checkpoint, read by one rank in small pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ecrm.base.errors import DataError, EcrmError
from ecrm.checkpoint.folder import Checkpoint, CheckpointFolder, find
from ecrm.checkpoint.manifest import Manifest
from ecrm.checkpoint.row_file import FRAME_ROWS, read_rows
from ecrm.placement.stripes import RowLayout
from ecrm.protection.restoring import Piece


class CheckpointRows:
    """A source of rows: a run's own checkpoints, then the checkpoints it was resumed from.

    All ranks see the same folders. Implements `ecrm.protection.restoring.RowSource`.
    """

    def __init__(
        self,
        own: CheckpointFolder | None,
        resumed: Sequence[Path] = (),
        begins_with: Path | None = None,
    ) -> None:
        self._own, self._resumed, self._begins_with = own, tuple(resumed), begins_with

    def read(self, shard: int, layouts: Sequence[RowLayout]) -> LostRows:
        """A reader for the rows of a shard; only manifests of own checkpoints are read yet."""
        own = find(self._own.path)[0] if self._own is not None else []
        return LostRows(
            [*(checkpoint.path for checkpoint in own), *self._resumed],
            shard,
            layouts,
            self._begins_with,
        )


class LostRows:
    """The rows of one shard, from the newest of the `offered` checkpoints with all row files right.

    `step` is the number of steps in the rows: None until `check` has ended, 0 without a checkpoint
    or if the checkpoint is `begins_with`. `begins` tells the latter case: only the values of the
    rows count. `refused` has the reasons for not using newer checkpoints.
    """

    def __init__(
        self,
        offered: Sequence[Path],
        shard: int,
        layouts: Sequence[RowLayout],
        begins_with: Path | None = None,
    ) -> None:
        self._offered = [*offered, begins_with] if begins_with is not None else offered
        self._shard, self._layouts, self._begins_with = shard, layouts, begins_with
        self.begins = False
        self._checkpoint: Checkpoint | None = None
        self.step: int | None = None
        self.refused: list[str] = []

    def check(self) -> Iterator[None]:
        """Find the newest usable checkpoint, reading all row files; yields every few megabytes."""
        for path in self._offered:
            try:
                checkpoint = Checkpoint.open(path)
                for link in checkpoint.chain:
                    for entry in link.manifest.row_files:
                        yield from link.checking(entry)
            except EcrmError as error:
                self.refused.append(f"checkpoint {path} is not used: {error}")
                continue
            self.begins = path == self._begins_with
            self._checkpoint, self.step = checkpoint, 0 if self.begins else checkpoint.step
            return
        self.step = 0

    def pieces(self) -> Iterator[Piece]:
        """After `check`: (space, local rows, records), each piece from some frames of a file.

        A piece may have no row. Of a repeated row the first record counts. Raises DataError if a
        file can no longer be read.
        """
        for link in reversed(self._checkpoint.chain if self._checkpoint is not None else ()):
            for entry in link.manifest.row_files:
                file = link.path / entry["name"]
                try:
                    yield from self._pieces_of(file, entry["space"], link.manifest)
                except OSError as error:
                    raise DataError(f"{file}: {error.strerror}") from None

    def _pieces_of(self, file: Path, space: int, manifest: Manifest) -> Iterator[Piece]:
        """Yield a piece for every FRAME_ROWS or more rows of a file: the shard's rows among them.

        Frames may be much smaller than FRAME_ROWS.
        """
        local_rows: list[Tensor] = []
        found: list[Tensor] = []
        read = 0
        for numbers, records in read_rows(
            file, manifest.record_bytes[space], manifest.space_rows[space]
        ):
            shards, local = self._layouts[space].locate(torch.from_numpy(numbers))
            here = (shards == self._shard).nonzero().squeeze(1)
            local_rows.append(local[here])
            found.append(torch.from_numpy(records).index_select(0, here))
            read += len(numbers)
            if read >= FRAME_ROWS:
                yield space, torch.cat(local_rows), torch.cat(found)
                local_rows, found, read = [], [], 0
        if found:
            yield space, torch.cat(local_rows), torch.cat(found)

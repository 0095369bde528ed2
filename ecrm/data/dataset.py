"""A prepared Criteo dataset for training: memory-mapped, with batches by row number.

Legend: B samples of a batch; a sample has 13 integers and 26 categories.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ecrm.base.errors import DataError, UsageError
from ecrm.base.opened_file import OpenedFile
from ecrm.data import dataset_info
from ecrm.data.hashing import cap_rows
from ecrm.data.layout import CATEGORIES, INTEGERS

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""dense float32 [B, 13], ids int64 [B, 26], labels float32 [B]; the caller's own memory."""

_HASH_BYTES = 1 << 22


class CriteoDataset:
    """A dataset directory made by `ecrm prepare`, with the last rows held out for evaluation.

    The last rows are the latest if the input was in the order of time.

    `tables` lists (name, rows) of the 26 tables; the ids of a table are below the table's rows, and
    id 0 stands for the missing value. `train_rows` and `eval_rows` count the rows of the two
    splits.
    """

    def __init__(
        self,
        directory: Path,
        manifest: dict[str, Any],
        max_rows_per_table: int | None,
        eval_fraction: float,
    ) -> None:
        """Map the files of a checked manifest; use `open`."""
        rows: int = manifest["rows"]
        self.train_rows, self.eval_rows = dataset_info.split_rows(rows, eval_fraction)
        self._directory, self._manifest = directory, manifest
        self._opened, mapped = [], []
        for name, (dtype, shape) in dataset_info.FILES.items():
            with open(directory / name, "rb") as file:
                self._opened.append(OpenedFile(directory / name, file))
                mapped.append(np.memmap(file, dtype, "r", shape=(rows, *shape)))
        self._labels, self._dense, self._sparse = mapped
        self._rows = np.array(list(manifest["tables"].values()), np.uint32)
        kept = np.minimum(self._rows, max_rows_per_table or self._rows)
        self._caps = kept.astype(np.int64) if (kept < self._rows).any() else None
        self.tables = list(zip(dataset_info.TABLE_NAMES, kept.tolist(), strict=True))

    @classmethod
    def open(
        cls,
        directory: str | Path,
        max_rows_per_table: int | None = None,
        eval_fraction: float = 0.1,
    ) -> CriteoDataset:
        """Open a dataset; check the manifest and the lengths of the files, not the contents.

        `max_rows_per_table` (2 to 2^31 - 1; `None` or 0 for no cap) limits the rows of larger
        tables. The cap folds ids: id 0 stays, a positive id becomes `1 + (id - 1) mod
        (max_rows_per_table - 1)`. The last `floor(rows * eval_fraction)` rows are held out. Raises
        `UsageError` for bad arguments, unreadable files and a directory without a dataset,
        `DataError` for a damaged manifest and for a file missing or of the wrong length.
        """
        if max_rows_per_table and not 2 <= max_rows_per_table < 2**31:
            raise UsageError(
                f"max_rows_per_table is {max_rows_per_table}: must be 0, for no cap, "
                f"or in 2 (one row is the missing value's) to {2**31 - 1}"
            )
        if not 0 <= eval_fraction < 1:
            raise UsageError(f"eval_fraction is {eval_fraction}, not in 0 up to but without 1")
        path = Path(directory)
        manifest = dataset_info.read_manifest(path)
        dataset_info.check_files(path, manifest)
        try:
            return cls(path, manifest, max_rows_per_table, eval_fraction)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}") from error

    def train_batch(self, start: int, size: int) -> Batch:
        """Return `size` training rows from `start` on, restarting at row 0 after the last row.

        Raises `ValueError` for negative numbers, `DataError` for an id out of the table's range.
        """
        if start < 0 or size < 0:
            raise ValueError(f"start {start} and size {size} must not be negative")
        pieces, done = [], 0
        while done < size:
            begin = (start + done) % self.train_rows
            pieces.append(slice(begin, min(begin + size - done, self.train_rows)))
            done += pieces[-1].stop - begin
        return self._read(pieces)

    def eval_batch(self, start: int, size: int) -> Batch:
        """Return the held-out rows `start` to `start + size` - 1, cut off at the end of the split.

        Raises `ValueError` for negative numbers, `DataError` for an id out of the table's range.
        """
        if start < 0 or size < 0:
            raise ValueError(f"start {start} and size {size} must not be negative")
        begin, end = (self.train_rows + min(row, self.eval_rows) for row in (start, start + size))
        return self._read([slice(begin, end)])

    def batch_for(self, step: int, slot: int, slots: int, global_batch: int) -> Batch:
        """Return the training rows of a slot in a step.

        The slot gets the rows of the step's global batch from `slot * global_batch // slots` up to
        the first row of the next slot. Global batches follow in file order; step 0 starts with
        row 0.
        """
        if not 0 <= slot < slots:
            raise ValueError(f"slot {slot} is not one of {slots}")
        begin, end = (part * global_batch // slots for part in (slot, slot + 1))
        return self.train_batch(step * global_batch + begin, end - begin)

    def verify(self) -> None:
        """Read all files, and compare the SHA-256 sums with the manifest.

        Raises `DataError` naming the first file with a different sum.
        """
        for name, record in self._manifest["files"].items():
            digest = hashlib.sha256()
            with open(self._directory / name, "rb") as file:
                while data := file.read(_HASH_BYTES):
                    digest.update(data)
            if digest.hexdigest() != record.get("sha256"):
                raise DataError(
                    f"{self._directory / name}: expected SHA-256 {record.get('sha256')}, "
                    f"found {digest.hexdigest()}"
                )

    def _read(self, pieces: list[slice]) -> Batch:
        """Copy row ranges of the mapped files, in order, into a batch.

        Raises DataError if a file has changed since the dataset was opened, and for an id out of
        range. A file cut short during the copy ends the process.
        """
        self._check_files()
        size = sum(piece.stop - piece.start for piece in pieces)
        dense = np.empty((size, INTEGERS), np.float32)
        ids = np.empty((size, CATEGORIES), np.int64)
        labels = np.empty(size, np.float32)
        done = 0
        for piece in pieces:
            into = slice(done, done + piece.stop - piece.start)
            dense[into], ids[into], labels[into] = (
                self._dense[piece],
                self._sparse[piece],
                self._labels[piece],
            )
            # Seen as unsigned, a negative id is too large.
            if (stray := self._sparse[piece].view(np.uint32) >= self._rows).any():
                row, table = (int(place) for place in np.argwhere(stray)[0])
                name, last = dataset_info.TABLE_NAMES[table], int(self._rows[table]) - 1
                found = self._sparse[piece.start + row, table]
                error = DataError(
                    f"{self._directory / 'sparse.bin'}: row {piece.start + row} "
                    f"has id {found} in table {name}, whose ids are 0 to {last}"
                )
                error.rows = (piece.start, piece.stop)
                raise error
            done = into.stop
        self._check_files()
        if self._caps is not None:
            cap_rows(ids, self._caps)
        return torch.from_numpy(dense), torch.from_numpy(ids), torch.from_numpy(labels)

    def _check_files(self) -> None:
        for file in self._opened:
            file.check()

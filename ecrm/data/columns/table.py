"""A prepared table for a session: memory-mapped, read by row numbers, in TorchRec's batches.

Legend: B rows of a batch, n dense columns, F features, T ids of all rows and features.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ecrm.base.errors import DataError, UsageError
from ecrm.base.opened_file import OpenedFile
from ecrm.base.paths import typed_path
from ecrm.data.columns import manifest as info

if TYPE_CHECKING:
    from torchrec.datasets.utils import Batch


@dataclass(frozen=True)
class TableRows:
    """B rows of a table as arrays: samples of `ecrm.Indexed`, before `Table.collate`.

    `dense` float32 [B, n], `labels` float32 [B], `lengths` int64 [F, B], and `ids` int64 [T], the
    ids of the first feature of all rows first. `weights` float32 [T], None without a weighted
    feature.
    """

    dense: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    ids: np.ndarray
    weights: np.ndarray | None

    def __len__(self) -> int:
        return len(self.labels)


class Table:
    """A folder made by `ecrm prepare table`, as a dataset for `ecrm.Indexed`.

    `ecrm.Indexed(table.train, batch_size=512, collate=table.collate)` has the batches. A batch is a
    `torchrec.datasets.utils.Batch`: `dense_features` float32 [B, n], `labels` float32 [B], and
    `sparse_features`, a KeyedJaggedTensor with a key for each feature. If a feature is weighted,
    the KeyedJaggedTensor has weights, 1 for all other features.

    Training rows come first, then held-out rows, each in the order of time if the schema has a time
    column, else in the order of the files. Reading needs no pyarrow. Files must stay as they are:
    a change is a DataError. Raises UsageError for a folder without a prepared table, DataError for
    a damaged table.
    """

    def __init__(self, directory: str | Path) -> None:
        path = typed_path(directory)
        manifest, schema = info.read_manifest(path)
        self.digest: str = info.digest_of(manifest)
        """SHA-256 of the manifest, which has the SHA-256 of every file: equal for equal data."""
        self.rows: dict[str, int] = manifest["tables"]
        """The number of rows of every table, by name; ids are below."""
        self.features: dict[str, list[str]] = {name: [] for name in self.rows}
        """The features looking rows up in a table, by the name of the table."""
        for column in schema.features:
            self.features[column.table].append(column.name)
        self.dense: list[str] = [column.name for column in schema.of_kind("dense")]
        """The names of the dense columns, in the order of a batch."""
        self.weighted: list[str] = [column.name for column in schema.of_kind("weighted")]
        """The names of the features with weights."""
        self._path, self._columns = path, schema.features
        self._opened: list[OpenedFile] = []
        self._files: dict[str, np.ndarray] = {}
        for name, (dtype, shape) in info.layouts(schema).items():
            self._files[name] = self._mapped(name, dtype, (manifest["files"][name], *shape))
        self._order: np.ndarray | None = None
        if info.ORDER in manifest["files"]:
            self._order = self._mapped(info.ORDER, "<i8", (manifest["files"][info.ORDER],))
        self._train_rows: int = manifest["train_rows"]
        self._first, self._last = 0, int(manifest["rows"])

    def _mapped(self, name: str, dtype: str, shape: tuple[Any, ...]) -> np.ndarray:
        """The array of a file; `shape` begins with the manifest's record of the file."""
        record, *rest = shape
        extent = (record["shape"][0], *rest)
        path = self._path / name
        try:
            with open(path, "rb") as file:
                self._opened.append(OpenedFile(path, file))
                if not record["bytes"]:
                    return np.empty(extent, dtype)
                return np.memmap(file, dtype, "r", shape=extent)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}") from error

    @property
    def train(self) -> Table:
        """The rows for training."""
        return self._part(0, self._train_rows)

    @property
    def held_out(self) -> Table:
        """The rows held out for evaluation."""
        return self._part(self._train_rows, len(self._files[info.LABELS]))

    def _part(self, first: int, last: int) -> Table:
        part = copy.copy(self)
        part._first, part._last = max(first, self._first), min(last, self._last)
        return part

    def __len__(self) -> int:
        return max(0, self._last - self._first)

    def __getitem__(self, number: int, /) -> TableRows:
        """The row `number`, from 0; negative numbers count from the end."""
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self)} rows")
        return self.__getitems__([number % len(self)])

    def __getitems__(self, numbers: Sequence[int], /) -> TableRows:
        """Many rows at once, numbered from 0.

        Raises DataError for a changed file and for an id outside the id's table. Not checked: that
        numbers are below the number of rows.
        """
        self._check_files()
        rows = np.asarray(numbers, np.int64) + self._first
        if self._order is not None:
            rows = self._order[rows]
        single, place = self._files[info.IDS][rows], 0
        ids, lengths, weights = [], [], []
        for number, column in enumerate(self._columns):
            if column.kind == "categorical":
                found, count = single[:, place], np.ones(len(rows), np.int64)
                at, place = rows, place + 1
            else:
                at, count = self._places(number, rows)
                found = self._files[info.bag_file(number, "ids")][at]
            self._check_ids(number, found)
            ids.append(found)
            lengths.append(count)
            if self.weighted:
                weights.append(
                    self._files[info.bag_file(number, "weights")][at]
                    if column.kind == "weighted"
                    else np.ones(len(found), np.float32)
                )
        read = TableRows(
            np.asarray(self._files[info.DENSE][rows], np.float32),
            np.asarray(self._files[info.LABELS][rows], np.float32),
            np.stack(lengths),
            np.concatenate(ids).astype(np.int64),
            np.concatenate(weights) if self.weighted else None,
        )
        self._check_files()
        return read

    def _places(self, number: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the ids of a feature's rows are in the file, int64 [T], and the lengths [B]."""
        ends = self._files[info.bag_file(number, "ends")]
        last = ends[rows]
        first = np.where(rows > 0, ends[rows - 1], 0)
        lengths = last - first
        total = len(self._files[info.bag_file(number, "ids")])
        if (lengths < 0).any() or (last > total).any() or (first < 0).any():
            path = self._path / info.bag_file(number, "ends")
            raise DataError(f"{path}: damaged, the ends of lists do not ascend")
        begin = np.cumsum(lengths) - lengths
        return np.repeat(first - begin, lengths) + np.arange(lengths.sum()), lengths

    def _check_ids(self, number: int, ids: np.ndarray) -> None:
        column = self._columns[number]
        rows = self.rows[column.table]
        # seen as unsigned, a negative id is too large
        stray = ids.astype(np.uint32) >= rows
        if stray.any():
            raise DataError(
                f"{self._path}: feature {column.name} has id {ids[stray][0]}, and ids of table "
                f"{column.table} are 0 to {rows - 1}"
            )

    def _check_files(self) -> None:
        for file in self._opened:
            file.check()

    def collate(self, rows: TableRows | Sequence[TableRows]) -> Batch:
        """Make a batch of rows read from this table, or from tables with the same schema."""
        import torch
        from torchrec import KeyedJaggedTensor
        from torchrec.datasets.utils import Batch

        if not isinstance(rows, TableRows):
            rows = _joined(rows)
        weights = None if rows.weights is None else torch.from_numpy(rows.weights)
        return Batch(
            torch.from_numpy(rows.dense),
            KeyedJaggedTensor(
                [column.name for column in self._columns],
                torch.from_numpy(rows.ids),
                weights,
                lengths=torch.from_numpy(rows.lengths.reshape(-1)),
            ),
            torch.from_numpy(rows.labels),
        )


def _joined(parts: Sequence[TableRows]) -> TableRows:
    """Several rows as one block: the ids of a feature of all parts together."""

    def by_feature(values: list[np.ndarray]) -> np.ndarray:
        cuts = [np.cumsum(part.lengths.sum(1))[:-1] for part in parts]
        divided = [np.split(some, cut) for some, cut in zip(values, cuts)]
        return np.concatenate([piece for feature in zip(*divided) for piece in feature])

    weights = [part.weights for part in parts if part.weights is not None]
    return TableRows(
        np.concatenate([part.dense for part in parts]),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.lengths for part in parts], axis=1),
        by_feature([part.ids for part in parts]),
        by_feature(weights) if weights else None,
    )

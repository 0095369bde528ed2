"""The files of a table being prepared, with counts and checksums for the manifest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ecrm.base.errors import DataError
from ecrm.data.columns import manifest as info
from ecrm.data.columns.convert import Converted, Ids
from ecrm.data.columns.schema import Column, Schema
from ecrm.data.output import write_synced


class _File:
    """A binary file being written, with its SHA-256."""

    def __init__(self, path: Path, dtype: str, shape: tuple[int, ...], stack: ExitStack) -> None:
        self._dtype, self._shape, self._digest = dtype, shape, hashlib.sha256()
        self._file = stack.enter_context(open(path, "wb"))
        self.count = 0

    def append(self, array: np.ndarray) -> None:
        """Write rows."""
        self.count += len(array)
        data = np.ascontiguousarray(array, self._dtype).data
        if data.nbytes:
            self._file.write(data)
            self._digest.update(data)

    def finish(self) -> dict[str, Any]:
        """Bring the file to disk and return the manifest's record."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {
            "dtype": self._dtype,
            "shape": [self.count, *self._shape],
            "bytes": self._file.tell(),
            "sha256": self._digest.hexdigest(),
        }


class Vocabulary:
    """The values of a table in the order of first appearance; row 0 is for unknown values.

    A vocabulary with `known` values takes no further value.
    """

    def __init__(self, known: list[str] | None = None) -> None:
        self._grows = known is None
        self._rows = {value: row for row, value in enumerate(known or [], 1)}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def values(self) -> list[str]:
        """The values, the value of row 1 first."""
        return list(self._rows)

    def rows(self, ids: Ids) -> tuple[np.ndarray, int]:
        """Return the table rows int32 [T] of the ids of a block, and the number unknown."""
        assert ids.vocabulary is not None
        if self._grows:
            for value in ids.vocabulary:
                if value:
                    self._rows.setdefault(value, len(self._rows) + 1)
        rows = np.array([*(self._rows.get(value, 0) for value in ids.vocabulary), 0], np.int32)
        found: np.ndarray = rows[ids.ids]
        return found, int(np.count_nonzero((found == 0) & (ids.ids >= 0)))


class Writer:
    """Writes the converted blocks of a table.

    `known` has the values of the tables with a vocabulary prepared before, by table.
    """

    def __init__(
        self, stack: ExitStack, directory: Path, schema: Schema, known: Mapping[str, list[str]]
    ) -> None:
        self.rows = 0
        self._directory, self._schema, self._stack = directory, schema, stack
        self._files = {
            name: _File(directory / name, dtype, shape, stack)
            for name, (dtype, shape) in info.layouts(schema).items()
        }
        self._vocabularies = {
            table: Vocabulary(known.get(table))
            for table, column in schema.tables.items()
            if column.vocabulary
        }
        self._label_sum, self._binary = 0.0, True
        self._missing = {column.name: 0 for column in (*schema.of_kind("dense"), *schema.features)}
        self._unknown = {column.name: 0 for column in schema.features if column.vocabulary}
        self._times: list[np.ndarray] = []
        self._parts: list[tuple[int, np.ndarray]] = []  # of blocks with parts, by the first row
        self._held_out: list[np.ndarray] = []

    def write(self, rows: Converted) -> None:
        """Append the rows of a block."""
        self.rows += len(rows.labels)
        self._label_sum += float(rows.labels.sum(dtype=np.float64))
        self._binary &= bool(((rows.labels == 0) | (rows.labels == 1)).all())
        for name, count in rows.missing.items():
            self._missing[name] += count
        if rows.times is not None:
            self._times.append(rows.times.whole)
            if rows.times.part.any():
                self._parts.append((self.rows - len(rows.labels), rows.times.part))
        if rows.held_out is not None:
            self._held_out.append(rows.held_out)
        self._files[info.LABELS].append(rows.labels)
        self._files[info.DENSE].append(rows.dense)
        single = []
        for number, column in enumerate(self._schema.features):
            feature = rows.features[column.name]
            ids = self._table_rows(column, feature)
            if feature.lengths is None:
                single.append(ids)
                continue
            written = self._files[info.bag_file(number, "ids")]
            ends = written.count + np.cumsum(feature.lengths)
            written.append(ids)
            self._files[info.bag_file(number, "ends")].append(ends)
            if feature.weights is not None:
                self._files[info.bag_file(number, "weights")].append(feature.weights)
        shape = (len(rows.labels), len(single))
        into = np.empty(shape, np.int32)
        for place, ids in enumerate(single):
            into[:, place] = ids
        self._files[info.IDS].append(into)

    def _table_rows(self, column: Column, feature: Ids) -> np.ndarray:
        if feature.vocabulary is None:
            return feature.ids
        rows, unknown = self._vocabularies[column.table].rows(feature)
        self._unknown[column.name] += unknown
        return rows

    def finish(self) -> dict[str, Any]:
        """Bring the files to disk and return the manifest without the sources."""
        order, train_rows = self._order()
        if order is not None:
            self._files[info.ORDER] = _File(self._directory / info.ORDER, "<i8", (), self._stack)
            self._files[info.ORDER].append(order)
        files = {name: file.finish() for name, file in self._files.items()}
        for number, (table, column) in enumerate(self._schema.tables.items()):
            if column.vocabulary:
                lines = (json.dumps(one) + "\n" for one in self._vocabularies[table].values)
                data = "".join(lines).encode()
                name = info.vocabulary_file(number)
                write_synced(self._directory / name, data)
                files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        return {
            "format": info.FORMAT,
            "format_version": info.VERSION,
            "rows": self.rows,
            "train_rows": train_rows,
            "label_mean": self._label_sum / self.rows,
            "binary_labels": self._binary,
            "tables": {
                table: column.rows or len(self._vocabularies[table]) + 1
                for table, column in self._schema.tables.items()
            },
            "missing": self._missing,
            "unknown": self._unknown,
            "schema": self._schema.to_dict(),
            "files": files,
        }

    def _order(self) -> tuple[np.ndarray | None, int]:
        """The rows in order, training rows first, int64 [rows], and the number of training rows.

        The order is None if rows are in order already.
        """
        if not self._times and not self._held_out:
            return None, self.rows - int(self.rows * self._schema.held_out)
        keys = [np.concatenate(found) for found in (self._times, self._held_out) if found]
        if self._parts:
            parts = np.zeros(self.rows)
            for first, part in self._parts:
                parts[first : first + len(part)] = part
            keys.insert(0, parts)
        order = np.lexsort(keys)
        train_rows = self.rows - int(self.rows * self._schema.held_out)
        if self._held_out:
            train_rows = self.rows - int(keys[-1].sum())
            (column,) = self._schema.of_kind("split")
            for count, what, option, given in (
                (train_rows, "every row is held out", "train", column.train),
                (self.rows - train_rows, "no row is held out", "held_out", column.held_out),
            ):
                if not count:
                    raise DataError(
                        f"{what}: column {column.name!r} has no value of {option} = {list(given)}: "
                        f'correct {option} in the schema, or give the column kind = "unused"'
                    )
        if (order[1:] > order[:-1]).all():
            return None, train_rows
        return order, train_rows

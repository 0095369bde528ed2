"""A block of Arrow columns to the arrays of a prepared table.

Legend: R rows of the block, n dense columns, T ids of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ecrm.base.errors import DataError
from ecrm.data.columns import values
from ecrm.data.columns.arrow import pyarrow
from ecrm.data.columns.block import Block, mistyped
from ecrm.data.columns.schema import LARGEST_DENSE, Column, Schema
from ecrm.data.columns.text_hash import hashed_rows, text_hashes
from ecrm.data.columns.times import Clock, Times, read_times
from ecrm.data.columns.values import WrongType
from ecrm.data.malformed import Malformed

_UNIT_ADVICE = 'unit = "s", "ms", "us" or "ns" to read the numbers as dates'


@dataclass(frozen=True)
class Ids:
    """The ids of a feature: `lengths` int64 [R], None for one id a row; `weights` float32 [T].

    `ids` int32 [T] are rows of the table; with a `vocabulary`, places in that list of values, and
    -1 for a missing value.
    """

    ids: np.ndarray
    lengths: np.ndarray | None = None
    weights: np.ndarray | None = None
    vocabulary: list[str] | None = None


@dataclass(frozen=True)
class Converted:
    """The arrays of a block.

    `labels` float32 [R], `dense` float32 [R, n], `features` by name, `times` of R rows,
    `held_out` bool [R], `missing` counts the missing values by column. Rows with malformed values
    are left out. `bad` describes these rows and lines of the file unfit for a row.
    """

    labels: np.ndarray
    dense: np.ndarray
    features: dict[str, Ids]
    times: Times | None
    held_out: np.ndarray | None
    missing: dict[str, int]
    bad: list[Malformed]
    bytes_read: int
    unit: str

    @property
    def malformed(self) -> int:
        """The number of malformed lines and rows."""
        return len(self.bad)

    @property
    def examples(self) -> Iterator[Malformed]:
        """A description of every malformed line or row."""
        return iter(self.bad)


def convert(block: Block, schema: Schema, clock: Clock) -> Converted:
    """Convert a block; a row with a malformed value is left out and described.

    `clock` is of all files, and learns the first time. Raises DataError for a column of a type
    unfit for the kind.
    """
    converter = _Converter(block, schema, clock)
    if not converter.bad:
        return converter.result(block.malformed)
    rows = sorted(converter.bad)
    bad = block.malformed + [
        Malformed(block.path, int(block.numbers[row]), *converter.bad[row]) for row in rows
    ]
    kept = np.ones(len(block.numbers), bool)
    kept[rows] = False
    sound = Block(
        block.path,
        block.columns.filter(pyarrow.array(kept)),
        block.numbers[kept],
        block.bytes_read,
        block.unit,
    )
    return _Converter(sound, schema, clock).result(sorted(bad, key=lambda one: one.line))


class _Converter:
    """Converts the columns of a block, and gathers the rows with malformed values."""

    def __init__(self, block: Block, schema: Schema, clock: Clock) -> None:
        self._block, self._schema, self._rows = block, schema, len(block.numbers)
        self._clock = clock
        self.bad: dict[int, tuple[str, str]] = {}  # a reason and an advice by row
        self._missing: dict[str, int] = {}
        dense = schema.of_kind("dense")
        self._labels = np.zeros(self._rows, np.float32)
        self._dense = np.zeros((self._rows, len(dense)), np.float32)
        self._features: dict[str, Ids] = {}
        self._times: Times | None = None
        self._held_out: np.ndarray | None = None
        places = {column.name: place for place, column in enumerate(dense)}
        for column in schema.read:
            array = block.columns.column(column.name)
            try:
                if column.kind == "dense":
                    self._dense[:, places[column.name]] = self._number(column, array)
                elif column.kind != "weights":
                    getattr(self, f"_{column.kind}")(column, array)
            except WrongType as error:
                raise mistyped(block.path, column, str(array.type), str(error)) from None
            except pyarrow.ArrowException as error:
                first = str(error).split("\n")[0]
                raise DataError(f"{block.path}: column {column.name!r}: {first}") from error

    def result(self, bad: list[Malformed]) -> Converted:
        """The arrays, with the malformed lines and rows `bad`."""
        return Converted(
            self._labels,
            self._dense,
            self._features,
            self._times,
            self._held_out,
            self._missing,
            bad,
            self._block.bytes_read,
            self._block.unit,
        )

    def _refuse(self, column: Column, bad: values.Bad) -> None:
        for row, reason in bad:
            self.bad.setdefault(row, (f"{column.name} {reason}", _advice(column)))

    def _refuse_where(self, column: Column, wrong: np.ndarray, reason: str) -> None:
        self._refuse(column, [(int(row), reason) for row in np.flatnonzero(wrong)])

    def _refuse_missing(self, column: Column, missing: np.ndarray) -> None:
        way = f'type kind = "unused" for the column {column.name}'
        if column.kind == "label":
            way = (
                f'give another column kind = "label", and the column {column.name} kind = "unused"'
            )
        advice = f"fill the column {column.name} in the file, or {way} in the schema"
        for row in np.flatnonzero(missing):
            self.bad.setdefault(int(row), (f"{column.name} is missing", advice))

    def _number(self, column: Column, array: Any) -> np.ndarray:
        """A dense column, float32 [R]."""
        found, bad = values.numbers(array)
        self._refuse(column, bad)
        missing = np.isnan(found)
        if missing.any():
            found = np.where(missing, column.missing, found)
        self._missing[column.name] = int(missing.sum())
        self._refuse_where(column, np.abs(found) > LARGEST_DENSE, "is not finite as a float32")
        if column.transform == "log":
            found = np.log(np.maximum(found, -2) + 3.0)
        elif column.transform == "signed_log":
            found = np.sign(found) * np.log1p(np.abs(found))
        with np.errstate(over="ignore"):
            return found.astype(np.float32)

    def _label(self, column: Column, array: Any) -> None:
        if column.equals is not None:
            found, bad = values.texts(array)
            missing = found.is_null().to_numpy(zero_copy_only=False)
            equal = pyarrow.compute.equal(found, values.as_text(column.equals)).fill_null(False)
            labels = equal.to_numpy(zero_copy_only=False)
        else:
            labels, bad = values.numbers(array)
            refused = [row for row, _ in bad]
            missing = np.isnan(labels)
            missing[refused] = False
            if column.above is not None:
                labels = labels > column.above
            else:
                self._refuse_where(column, np.abs(labels) > LARGEST_DENSE, "is not finite")
        self._refuse(column, bad)
        self._refuse_missing(column, missing)
        with np.errstate(over="ignore"):
            self._labels[:] = labels

    def _categorical(self, column: Column, array: Any) -> None:
        texts, bad = values.texts(array)
        self._refuse(column, bad)
        ids = _rows_of(texts, column)
        self._missing[column.name] = int(np.count_nonzero(_missing_in(ids)))
        self._features[column.name] = ids

    def _multi_hot(self, column: Column, array: Any) -> None:
        found, lengths = values.lists(array, column.separator)
        self._bags(column, found, lengths, None)

    def _weighted(self, column: Column, array: Any) -> None:
        found, lengths = values.lists(array, column.separator)
        if column.weights:
            weights = self._weights_beside(column, lengths)
        else:
            ids, given, bad = values.pairs(found, column.weight_separator or ":")
            places = np.repeat(np.arange(self._rows), lengths)
            self._refuse(column, [(int(places[at]), reason) for at, reason in bad])
            weights, bad = values.numbers(given)
            self._refuse(column, [(int(places[at]), f"has a weight that {why}") for at, why in bad])
            found = ids
        self._bags(column, found, lengths, weights)

    def _weights_beside(self, column: Column, lengths: np.ndarray) -> np.ndarray:
        """The weights of a column of their own, float64 [T]; rows of another length are bad."""
        (beside,) = (one for one in self._schema.of_kind("weights") if one.name == column.weights)
        found, own = values.lists(self._block.columns.column(beside.name), beside.separator)
        weights, bad = values.numbers(found)
        places = np.repeat(np.arange(self._rows), own)
        self._refuse(beside, [(int(places[at]), f"has a weight that {why}") for at, why in bad])
        differs = np.flatnonzero(own != lengths)
        self._refuse(
            beside,
            [
                (int(row), f"has {own[row]} weights for the {lengths[row]} ids of {column.name}")
                for row in differs
            ],
        )
        return weights if not len(differs) else np.ones(int(lengths.sum()))

    def _bags(
        self, column: Column, found: Any, lengths: np.ndarray, weights: np.ndarray | None
    ) -> None:
        """Keep the ids of all rows, without missing ids."""
        places = np.repeat(np.arange(self._rows), lengths)
        texts, bad = values.texts(found)
        self._refuse(column, [(int(places[at]), f"has an id that {why}") for at, why in bad])
        ids = _rows_of(texts, column)
        missing = _missing_in(ids)
        self._missing[column.name] = int(np.count_nonzero(missing))
        if weights is not None:
            with np.errstate(over="ignore"):
                weights = weights.astype(np.float32)
            wrong = ~np.isfinite(weights) & ~missing
            self._refuse(
                column,
                [
                    (int(places[at]), "has a weight that is missing or not finite")
                    for at in np.flatnonzero(wrong)
                ],
            )
        kept = ids.ids
        if missing.any():
            kept, lengths = kept[~missing], np.bincount(places[~missing], minlength=self._rows)
            weights = None if weights is None else weights[~missing]
        self._features[column.name] = Ids(kept, lengths, weights, ids.vocabulary)

    def _time(self, column: Column, array: Any) -> None:
        times, bad = read_times(array, column.format, column.unit)
        self._times = times
        self._refuse(column, bad)
        self._refuse_missing(column, times.missing)
        sound = ~times.missing
        sound[[row for row, _ in bad]] = False
        differing = self._clock.differing(times, sound)
        if not differing.any():
            return
        found, before = ("a date", "numbers") if self._clock.numbers else ("a number", "dates")
        if not values.is_text(values.plain(array).type):
            raise WrongType(f"{before} as in the rows before, or {_UNIT_ADVICE}")
        reason = f"{column.name} is {found}, and the times before are {before}"
        advice = f"type {_UNIT_ADVICE}, for the column {column.name} in the schema"
        for row in np.flatnonzero(differing):
            self.bad.setdefault(int(row), (reason, advice))

    def _split(self, column: Column, array: Any) -> None:
        texts, bad = values.texts(array)
        self._refuse(column, bad)
        encoded = texts.dictionary_encode()
        found = encoded.dictionary.to_pylist()
        codes = encoded.indices.fill_null(len(found)).to_numpy(zero_copy_only=False)
        train, held_out = (
            set(map(values.as_text, part)) for part in (column.train, column.held_out)
        )
        neither = [one not in train | held_out for one in found]
        self._refuse(
            column,
            [
                (int(row), f"is {values.shown(found[codes[row]])}, in neither train nor held_out")
                for row in np.flatnonzero(np.array([*neither, False])[codes])
            ],
        )
        self._refuse_missing(column, codes == len(found))
        self._held_out = np.array([*(one in held_out for one in found), False])[codes]


def _advice(column: Column) -> str:
    """The words to type if no row of a file has a value fit for the column."""
    ways = {
        "label": f'type equals = "yes" or above = 3 for the label {column.name}',
        "time": f'type format = "%d.%m.%Y" or the like for the column {column.name}',
        "split": f"name the values of the column {column.name} in train or held_out",
    }
    kind = f'another kind for the column {column.name}, or kind = "unused"'
    return f"correct the file, or {ways.get(column.kind, f'type {kind}')} in the schema"


def _rows_of(texts: Any, column: Column) -> Ids:
    """The table rows of texts, a pyarrow.StringArray [T]; 0 or -1 for a missing or empty text."""
    if column.vocabulary:
        encoded = texts.dictionary_encode()
        found = encoded.dictionary.to_pylist()
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32)
        if "" in found:
            codes[codes == found.index("")] = -1
        return Ids(codes, vocabulary=found)
    assert column.rows is not None
    data, starts, lengths = _bytes_of(texts)
    rows = hashed_rows(text_hashes(data, starts, lengths), column.rows)
    if not lengths.all():
        rows[lengths == 0] = 0
    return Ids(rows)


def _missing_in(ids: Ids) -> np.ndarray:
    """Where the ids of `_rows_of` are of a missing value."""
    missing: np.ndarray = ids.ids == (0 if ids.vocabulary is None else -1)
    return missing


def _bytes_of(texts: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bytes of texts as `text_hashes` takes them: data, starts and lengths; a null has 0."""
    count = len(texts)
    if not count:
        return np.zeros(0, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64)
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + count + 1]
    bounds = bounds.astype(np.int64)
    text = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    padded = np.zeros(bounds[-1] - bounds[0] + 8, np.uint8)
    padded[:-8] = text[bounds[0] : bounds[-1]]
    bounds -= bounds[0]
    lengths = np.diff(bounds)
    if texts.null_count:
        lengths[texts.is_null().to_numpy(zero_copy_only=False)] = 0
    return padded, bounds[:-1], lengths

"""A draft of a schema from the first rows of files: the guessed kind of every column."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ecrm.base.errors import DataError
from ecrm.base.wording import counted
from ecrm.data.columns import values
from ecrm.data.columns.arrow import pyarrow
from ecrm.data.columns.block import Block, check_doubled
from ecrm.data.columns.files import arrow_errors, format_of, open_batches
from ecrm.data.columns.schema import Column, Schema
from ecrm.data.columns.text_lines import header_of, text_pieces
from ecrm.data.columns.times import read_times
from ecrm.data.malformed import Malformed
from ecrm.data.text_file import check_inputs

LOOKED_AT = 100_000
"""Rows of a file that a draft looks at."""

LARGEST_VOCABULARY = 1000
"""Most different values of a column with a vocabulary in a draft; more values are hashed."""

_LABELS = ("label", "click", "clicked", "is_click", "target", "y", "conversion", "converted")
_POSITIVE = ("yes", "y", "t", "click", "clicked", "positive", "pos", "bought", "converted", "like")
_DOTTED = r"^[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{4}$"
_RATINGS = ("rating", "stars", "score")
_TIMES = re.compile(r"(^|_)(time|timestamp|ts|date|datetime|day)(_|$)|_at$", re.IGNORECASE)
_BEST_TIMES = re.compile(r"(^|_)(timestamp|ts|datetime|date)(_|$)", re.IGNORECASE)
_FEW_TIMES, _EARLY = 366, 1e8
"""Numbers below `_EARLY` with at most `_FEW_TIMES` different values are days or hours, no times."""
_SPLITS = ("split", "fold", "part", "subset", "set")
_IDS = re.compile(
    r"(^|[_ .])(id|ids|code|zip|cat|category|type|key|hash)(\d*)([_ .]|$)|Id$|:token"
    r"|^(user|item|movie|product|ad|campaign|video|song|shop|brand)$",
    re.I,
)
_PAIR = r"(?s)^.+:[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$"
"""An id and a weight, as a weighted column reads texts."""
_HELD_OUT = ("test", "valid", "val", "validation", "eval", "dev", "holdout", "held_out")
_HELD_OUT_LINE = ["held_out = 0.1  # the share of the last rows, held out for evaluation"]
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def draft(inputs: Sequence[str]) -> str:
    """Return the text of a schema for files, with a comment about every column.

    The kinds are guesses from names, types and the first rows of every file. Raises UsageError for
    an unreadable file, a directory and a file named twice, DataError for damaged files, for files
    with different columns and for files without a row.
    """
    check_inputs(inputs)
    table, malformed, laid_out = _first_rows(inputs)
    if not table.num_rows:
        raise DataError(f"{', '.join(inputs)}: no rows: name a file with rows")
    found = [_Found(name, table.column(name)) for name in table.column_names]
    _choose(found)
    lines = [
        f"# A draft of `ecrm schema`, from the first {table.num_rows:,} rows of {inputs[0]}"
        f"{f' and {len(inputs) - 1} more' if len(inputs) > 1 else ''}. Check every line.",
        *([f"# {counted(malformed, 'malformed line')} skipped."] if malformed else []),
        "# Kinds: label, dense, categorical, multi_hot, weighted, weights, time, split, unused.",
        *laid_out,
        *(_HELD_OUT_LINE if all(one.kind != "split" for one in found) else []),
        "",
        "[columns]",
    ]
    if not any(one.kind == "label" for one in found):
        lines.append('# No column looks like the label: give one kind = "label".')
    return "\n".join([*lines, *(one.line() for one in found)]) + "\n"


def _first_rows(inputs: Sequence[str]) -> tuple[Any, int, list[str]]:
    """The first rows of files, the malformed lines between, and lines about the layout of text."""
    tables: list[Any] = []
    malformed: list[Malformed] = []
    laid_out: list[str] = []
    for path in inputs:
        form = format_of(path)
        if form == "text":
            names, delimiter, header = header_of(path)
            laid_out = [] if header else ["header = false"]
            laid_out += [f"delimiter = {_toml(delimiter)}"] if delimiter else []
            columns = tuple(Column(name, "split") for name in names)
            schema = Schema(columns, header=header, delimiter=delimiter)
            blocks = (piece.block() for piece in text_pieces(path, schema))
            tables.append(_taken(_columns(blocks, malformed)))
        else:
            with arrow_errors(path), open_batches(path, form, None) as (schema, batches, _):
                check_doubled(path, schema.names)
                empty = pyarrow.RecordBatch.from_pylist([], schema)
                tables.append(_taken(_with(empty, batches)))
        names, first = tables[-1].column_names, tables[0].column_names
        if sorted(names) != sorted(first):
            differing = sorted(set(names) ^ set(first))
            raise DataError(
                f"{path}: the columns differ from those of {inputs[0]}: "
                f"{', '.join(map(repr, differing))}"
            )
    table = pyarrow.table(
        {
            name: _joined(inputs, name, [one.column(name) for one in tables])
            for name in tables[0].column_names
        }
    )
    return table, len(malformed), laid_out


def _joined(inputs: Sequence[str], name: str, parts: list[Any]) -> Any:
    """The parts of a column of all files, in one type: that of all files, else dates, else texts.

    Raises DataError for lists beside other values, and for lists of other values.
    """
    parts = [values.plain(part) for part in parts]
    kinds = [part.type for part in parts]
    types = pyarrow.types
    if all(types.is_timestamp(kind) or types.is_date(kind) for kind in kinds):
        parts = parts if len(set(kinds)) == 1 else [_as_dates(part) for part in parts]
    elif not any(types.is_nested(kind) for kind in kinds) and not _alike(kinds):
        parts = [part.cast(pyarrow.string()) for part in parts]
    try:
        joined = pyarrow.concat_tables(
            [pyarrow.table({name: part}) for part in parts], promote_options="permissive"
        )
        return joined.column(name)
    except pyarrow.ArrowException:
        other = next(number for number, kind in enumerate(kinds) if kind != kinds[0])
        raise DataError(
            f"{inputs[other]}: column {name!r} holds {kinds[other]}, and in {inputs[0]} "
            f"{kinds[0]}: correct one file"
        ) from None


def _as_dates(part: Any) -> Any:
    """Dates as microseconds of UTC."""
    zone = getattr(part.type, "tz", None)
    return part.cast(pyarrow.timestamp("us", zone), safe=False).cast(pyarrow.timestamp("us", "UTC"))


def _alike(kinds: list[Any]) -> bool:
    """Whether types are one type, all of numbers, or all of texts; a column of nulls fits all."""
    types = pyarrow.types
    some = {kind for kind in kinds if not types.is_null(kind)}
    return (
        len(some) < 2
        or all(types.is_integer(kind) or types.is_floating(kind) for kind in some)
        or all(values.is_text(kind) for kind in some)
    )


def _columns(blocks: Iterator[Block], malformed: list[Malformed]) -> Iterator[Any]:
    for block in blocks:
        malformed += block.malformed
        yield block.columns


def _with(first: Any, batches: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from batches


def _taken(batches: Iterator[Any]) -> Any:
    """The first rows of batches as a pyarrow.Table."""
    taken, count = [], 0
    for batch in batches:
        taken.append(batch)
        count += batch.num_rows
        if count >= LOOKED_AT:
            break
    return pyarrow.Table.from_batches(taken).slice(0, LOOKED_AT)


class _Found:
    """The findings about a column, the guessed kind and the options of the kind."""

    def __init__(self, name: str, array: Any) -> None:
        self.name = name
        self.word = name.split(":")[0].lower()  # RecBole writes NAME:TYPE
        self._array = values.plain(array)
        self.type = self._array.type
        self.kind, self.note = "unused", ""
        self.options: dict[str, Any] = {}
        self.rows, self.missing = len(self._array), self._array.null_count
        try:
            self._look()
        except (values.WrongType, pyarrow.ArrowException):
            self.kind, self.options, self.note = "unused", {}, ", a type without a kind"

    def line(self) -> str:
        """The line of the schema file."""
        options = {"kind": self.kind, **self.options}
        inside = ", ".join(f"{name} = {_toml(value)}" for name, value in options.items())
        share = f", {self.missing / self.rows:.0%} missing" if self.missing else ""
        return f"{_key(self.name)} = {{ {inside} }}  # {self.type}{share}{self.note}"

    def _look(self) -> None:
        types = pyarrow.types
        if not self.rows or self.missing == self.rows:
            self.note = ", no values"
        elif types.is_nested(self.type):
            self._look_at_lists()
        elif values.is_text(self.type) and self._look_at_texts():
            return
        else:
            self._look_at_scalars()

    def _look_at_lists(self) -> None:
        ids, _ = values.lists(self._array, "")
        if pyarrow.types.is_struct(ids.type):
            ids, _, _ = values.pairs(ids, "")
            self.kind = "weighted"
        elif pyarrow.types.is_floating(ids.type):
            self.note = ", numbers: weights, if another column has the ids"
            return
        else:
            self.kind = "multi_hot"
        texts, _ = values.texts(ids)
        self._table(texts)

    def _look_at_texts(self) -> bool:
        """Look for lists in texts."""
        for separator in ("|", ";"):
            some = self._array.drop_null()
            with_it = pyarrow.compute.match_substring(some, separator)
            if pyarrow.compute.mean(with_it).as_py() > 0.2:
                ids, _ = values.lists(some, separator)
                self.kind, self.options = "multi_hot", {"separator": separator}
                paired = pyarrow.compute.match_substring_regex(ids, _PAIR)
                if pyarrow.compute.mean(paired).as_py() > 0.9:
                    self.kind = "weighted"
                    ids, _, _ = values.pairs(ids, ":")
                self._table(ids)
                return True
        return False

    def _look_at_scalars(self) -> None:
        types = pyarrow.types
        numbers = None
        if not (types.is_temporal(self.type) or types.is_binary(self.type)):
            numbers, bad = values.numbers(self._array)
            numbers = numbers[numbers == numbers]
            numbers = None if bad or not len(numbers) else numbers
        different = pyarrow.compute.count_distinct(self._array).as_py()
        self.note = f", {different:,} different values" if different > 1 else ", a single value"
        is_whole = numbers is not None and bool((numbers == numbers.round()).all())
        self.may_be_label = numbers is not None and set(np.unique(numbers)) == {0.0, 1.0}
        is_temporal = types.is_temporal(self.type)
        best_name = bool(_BEST_TIMES.search(self.word))
        few = different <= _FEW_TIMES and numbers is not None and numbers.max() < _EARLY
        named = best_name or (bool(_TIMES.search(self.word)) and not few)
        self.may_be_time = different > 1 and (is_temporal or named) and self._is_time()
        self.time_rank = (is_temporal, best_name, different)
        if self.word in _RATINGS and numbers is not None:
            halves = numbers * 2
            self.may_be_rating = bool((halves == halves.round()).all() and numbers.max() > 3)
        if numbers is None and different == 2 and self.word in _LABELS:
            two = values.texts(self._array)[0].unique().drop_null().to_pylist()
            self.may_be_label = len(two) == 2
            self.equals = max(two, key=lambda one: (one.lower() in _POSITIVE, one))
        self._note_dates()
        named_by_pandas = self.name == "" or self.name.startswith("Unnamed")
        if different < 2 or named_by_pandas or is_temporal:
            self.may_be_time &= not named_by_pandas
            return
        if self.word in _SPLITS and different <= 10:
            self._split()
            self.may_be_time = False
        elif numbers is not None and not (is_whole and _IDS.search(self.name)):
            self.kind = "dense"
            low, high = float(numbers.min()), float(numbers.max())
            self.note += f", {low:g} to {high:g}"
            if max(abs(low), abs(high)) > 100:
                self.options["transform"] = "log" if low >= -2 else "signed_log"
        elif numbers is None and different == self.rows > LARGEST_VOCABULARY:
            self.note += ", another value in every row"
        else:
            self.kind = "categorical"
            self._table(values.texts(self._array)[0])

    def _note_dates(self) -> None:
        """Note dates that need a format."""
        if not values.is_text(self.type):
            return
        dates = pyarrow.compute.match_substring_regex(self._array, _DOTTED)
        if pyarrow.compute.all(dates).as_py():
            self.note += ', dates: kind = "time", format = "%d.%m.%Y"'

    def _is_time(self) -> bool:
        try:
            return not read_times(self._array)[1]
        except (values.WrongType, pyarrow.ArrowException):
            return False

    def be_time(self) -> None:
        """Become the column of time."""
        self.kind, self.options = "time", {}
        numbers = read_times(self._array)[0].numbers
        if numbers.any() and not numbers.all():
            self.options["unit"] = "s"
            self.note += ", numbers and dates: s, ms, us or ns since 1970?"

    def _split(self) -> None:
        found = list(filter(None, self._array.unique().cast(pyarrow.string()).to_pylist()))
        found.sort(key=lambda one: (not one.lower().startswith("train"), one.zfill(9)))
        self.kind = "split"
        held_out = [one for one in found if one.lower() in _HELD_OUT]
        if not 0 < len(held_out) < len(found):
            held_out = found[-1:]  # the last fold
        self.options = {
            "train": [one for one in found if one not in held_out],
            "held_out": held_out,
        }

    def _table(self, texts: Any) -> None:
        """Set the options of the table for ids."""
        different = len(texts.unique().drop_null())
        self.note = self.note or f", {different:,} different values"
        if different <= LARGEST_VOCABULARY:
            self.options["vocabulary"] = True
        else:
            self.options["rows"] = min(2_000_000, 1000 * -(-8 * different // 1000))

    may_be_label = may_be_time = may_be_rating = False
    time_rank = (False, False, 0)
    equals = ""


def _choose(found: list[_Found]) -> None:
    """Choose one label and one column of time among the candidates."""
    candidates = [one for one in found if one.may_be_label and one.word in _LABELS]
    candidates = candidates or [one for one in found if one.may_be_rating]
    binary = [one for one in found if one.may_be_label]
    candidates = candidates or (binary if len(binary) == 1 else [])
    if candidates:
        label = candidates[0]
        label.kind = "label"
        label.options = {"equals": label.equals} if label.equals else {}
        if label.may_be_rating:
            label.options = {"above": 3.0}
    times = [one for one in found if one.may_be_time and one.kind != "label"]
    if times:
        time = max(times, key=lambda one: one.time_rank)
        time.be_time()
        for one in times:
            if one is not time:
                one.note += ", a second time"


def _key(name: str) -> str:
    """A TOML key."""
    return name if _BARE.fullmatch(name) else _toml(name)


def _toml(value: Any) -> str:
    """A TOML value."""
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False)

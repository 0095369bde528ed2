"""The schema of a table: the kind of every column, as written in a TOML file."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ecrm.base.errors import UsageError

LARGEST_TABLE = 2**31 - 1
LARGEST_DENSE = (2 - 2**-23) * 2.0**127
"""The largest float32."""

KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "label": ("the number to predict, such as 0 or 1", ("above", "equals")),
    "dense": ("a number", ("missing", "transform")),
    "categorical": ("one id", ("rows", "vocabulary", "table")),
    "multi_hot": ("any number of ids", ("rows", "vocabulary", "table", "separator")),
    "weighted": (
        "any number of ids, each with a weight",
        ("rows", "vocabulary", "table", "separator", "weight_separator", "weights"),
    ),
    "weights": ("the weights for the ids of a weighted column", ("separator",)),
    "time": ("the order of the rows", ("format", "unit")),
    "split": ("whether a row is for training or held out", ("train", "held_out")),
    "unused": ("not read", ()),
}
"""The meaning of every kind of column, and the options of the kind."""

SPARSE = ("categorical", "multi_hot", "weighted")
TRANSFORMS = ("log", "signed_log")
"""ln(max(x, -2) + 3) as for Criteo, and sign(x) ln(1 + |x|)."""

TIME_UNITS = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 0}
"""Microseconds in a unit of the numbers of a time; 0 for a unit below a microsecond."""


@dataclass(frozen=True)
class Column:
    """A column of the files: the kind, and the options of the kind as in the TOML file."""

    name: str
    kind: str
    rows: int | None = None
    vocabulary: bool = False
    table: str = ""
    missing: float = 0.0
    transform: str = ""
    separator: str = ""
    weight_separator: str = ""
    weights: str = ""
    above: float | None = None
    equals: str | None = None
    train: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    format: str = ""
    unit: str = ""


@dataclass(frozen=True)
class Schema:
    """Every column of the files, and how text files are laid out.

    `held_out` is the share of rows held out for evaluation, without a split column. `header` tells
    whether the first line of a text file names the columns. `delimiter` divides the fields of a
    text file; by default a tab if the first line has a tab, else a comma.
    """

    columns: tuple[Column, ...]
    held_out: float = 0.1
    header: bool = True
    delimiter: str = ""
    source: str = field(default="schema", compare=False)

    def of_kind(self, *kinds: str) -> tuple[Column, ...]:
        """The columns of the given kinds, in the order of the schema."""
        return tuple(column for column in self.columns if column.kind in kinds)

    @property
    def features(self) -> tuple[Column, ...]:
        """The columns of ids, each a feature of a table of rows."""
        return self.of_kind(*SPARSE)

    @property
    def read(self) -> tuple[Column, ...]:
        """The columns to read, all but the unused columns."""
        return tuple(column for column in self.columns if column.kind != "unused")

    @property
    def tables(self) -> dict[str, Column]:
        """The tables of rows by name, each with the first of the columns looking rows up there."""
        found: dict[str, Column] = {}
        for column in self.features:
            found.setdefault(column.table, column)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The schema as written in a TOML file, without options left at the default."""
        columns = {}
        for column in self.columns:
            given = {name: value for name, value in asdict(column).items() if name != "name"}
            columns[column.name] = {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in given.items()
                if name == "kind" or value != _DEFAULTS[name]
            }
        laid_out = {"held_out": self.held_out, "header": self.header, "delimiter": self.delimiter}
        return {**laid_out, "columns": columns}


_DEFAULTS = {field.name: field.default for field in fields(Column) if field.default is not MISSING}


def load_schema(path: Path) -> Schema:
    """Read a schema file. Raises UsageError with the file's name for every mistake in the file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8: {error}") from error
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}", otherwise=f"type ecrm schema FILES > {path} for a draft"
        ) from error
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error
    schema = parse_schema(given, str(path))
    if schema.held_out != Schema.held_out and (splits := schema.of_kind("split")):
        raise UsageError(
            f"{path}: held_out is {schema.held_out:g}, but the column {splits[0].name!r} of kind "
            "split has the held-out rows: leave out the line held_out, or give the column "
            'kind = "unused"'
        )
    return schema


def parse_schema(given: Mapping[str, Any], source: str) -> Schema:
    """Check the contents of a schema file, and return the schema.

    `source` is the name of the file for messages. Raises UsageError for the first mistake.
    """
    known = ("columns", "held_out", "header", "delimiter")
    for key in given:
        if key not in known:
            raise UsageError(f"{source}: {_unknown(key, known, 'key')}")
    columns = given.get("columns")
    if not isinstance(columns, dict) or not columns:
        raise UsageError(f"{source}: no [columns], the table with a line for each column")
    held_out = _typed(given.get("held_out", 0.1), float, f"{source}: held_out")
    if not 0 <= held_out < 1:
        raise UsageError(f"{source}: held_out is {held_out:g}: type a share, from 0 to below 1")
    delimiter = _typed(given.get("delimiter", ""), str, f"{source}: delimiter")
    if len(delimiter.encode()) > 1:
        raise UsageError(f"{source}: delimiter is {delimiter!r}: type one ASCII character")
    schema = Schema(
        tuple(_column(source, name, options) for name, options in columns.items()),
        held_out,
        _typed(given.get("header", True), bool, f"{source}: header"),
        delimiter,
        source,
    )
    _check_together(schema)
    return schema


def _column(source: str, name: str, options: Any) -> Column:
    """The column of one line. Raises UsageError for a wrong kind, option or value."""
    place = f"{source}: column {name!r}"
    if not isinstance(options, dict) or not isinstance(options.get("kind"), str):
        raise UsageError(f'{place}: type {{ kind = "..." }} with a kind of {", ".join(KINDS)}')
    kind = options["kind"]
    if kind not in KINDS:
        raise UsageError(f"{place}: {_unknown(kind, tuple(KINDS), 'kind')}")
    allowed = KINDS[kind][1]
    values: dict[str, Any] = {}
    for option, value in options.items():
        if option == "kind":
            continue
        if option not in allowed:
            raise UsageError(f"{place}: {_unknown(option, allowed, f'option of {kind}')}")
        values[option] = _option(f"{place}: {option}", option, value)
    if kind in SPARSE:
        values.setdefault("table", name)
        if bool(values.get("vocabulary")) == ("rows" in values):
            raise UsageError(
                f"{place}: type rows = N, to hash the values into N rows of a table, "
                "or vocabulary = true, to give every value a row"
            )
    if kind == "split" and not (values.get("train") and values.get("held_out")):
        raise UsageError(f"{place}: type the values of both parts, train = [...], held_out = [...]")
    if kind == "label" and len(values) > 1:
        raise UsageError(f"{place}: above and equals exclude each other: leave out one")
    return Column(name, kind, **values)


def _option(place: str, option: str, value: Any) -> Any:
    """The checked value of an option."""
    if option in ("train", "held_out"):
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise UsageError(f"{place} is {value!r}: type a list of texts")
        return tuple(value)
    if option == "rows":
        rows = _typed(value, int, place)
        if not 2 <= rows <= LARGEST_TABLE:
            raise UsageError(
                f"{place} is {rows}: must be in 2 (a row is the missing value's) to {LARGEST_TABLE}"
            )
        return rows
    if option == "transform" and value not in TRANSFORMS:
        raise UsageError(f"{place} is {value!r}: the transforms are {', '.join(TRANSFORMS)}")
    if option == "unit" and value not in TIME_UNITS:
        raise UsageError(f"{place} is {value!r}: the units are {', '.join(TIME_UNITS)}")
    kinds = {"vocabulary": bool, "missing": float, "above": float}
    found = _typed(value, kinds.get(option, str), place)
    if option == "missing" and abs(found) > LARGEST_DENSE:
        raise UsageError(f"{place} is {found:g}: type a number up to {LARGEST_DENSE:g}, a float32")
    if option in ("separator", "weight_separator", "table", "weights") and not found:
        raise UsageError(f"{place} is empty: leave out the option, or type a text")
    return found


def _typed(value: Any, kind: type, place: str) -> Any:
    """The value, if of the kind; a whole number may stand for a float."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**1000 else math.inf
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        noun = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}
        raise UsageError(f"{place} is {value!r}: type {noun[kind]}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{place} is {value}: type a finite number")
    return value


def _unknown(word: str, known: tuple[str, ...], noun: str) -> str:
    """The message for an unknown word, with the nearest known word."""
    near = get_close_matches(word, known, 1)
    advice = f"did you mean {near[0]}?" if near else f"the known are {', '.join(known) or 'none'}"
    return f"there is no {noun} {word!r}: {advice}"


def _check_together(schema: Schema) -> None:
    """Raise UsageError for columns in conflict, and for a label or ids missing."""
    source = schema.source
    for kind in ("label", "time", "split"):
        names = [column.name for column in schema.of_kind(kind)]
        if len(names) > 1:
            raise UsageError(
                f"{source}: {len(names)} columns are of kind {kind} ({', '.join(names)}): "
                'keep one, and give the others kind = "unused"'
            )
        if kind == "label" and not names:
            raise UsageError(
                f'{source}: no column is the label: give the column to predict kind = "label"'
            )
    if not schema.features:
        raise UsageError(
            f"{source}: no column has ids for tables of embeddings: "
            f"give one the kind {', '.join(SPARSE[:-1])} or {SPARSE[-1]}"
        )
    for column in schema.features:
        first = schema.tables[column.table]
        if (column.rows, column.vocabulary) != (first.rows, first.vocabulary):
            raise UsageError(
                f"{source}: columns {first.name!r} and {column.name!r} share the table "
                f"{column.table!r}: type the same rows or vocabulary for both"
            )
    named = [column.weights for column in schema.of_kind("weighted") if column.weights]
    carried = [column.name for column in schema.of_kind("weights")]
    for name in {*named, *carried}:
        if named.count(name) != 1 or carried.count(name) != 1:
            raise UsageError(
                f'{source}: column {name!r} needs kind = "weights", and exactly one weighted '
                f"column with weights = {name!r}"
            )

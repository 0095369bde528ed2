"""Points in time of an Arrow column: numbers, dates and texts, in one order over all files.

Legend: R rows of a column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ecrm.data.columns.arrow import pyarrow
from ecrm.data.columns.schema import TIME_UNITS, Schema
from ecrm.data.columns.values import Bad, WrongType, is_text, plain, shown

_NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"
_ZONED = r"\d:\d\d.*(Z|[-+]\d\d(:?\d\d)?)\s*$"
_LARGEST = 2.0**63


@dataclass(frozen=True)
class Times:
    """The points in time `whole + part` of R rows.

    `whole` is int64 [R]. `part` is float64 [R], from 0 to below 1. A date has microseconds since
    1970 in UTC; a date without a zone is taken as UTC. A number of no unit is kept. `numbers` bool
    [R] tells numbers of no unit from dates. Values are 0 where `missing`, bool [R].
    """

    whole: np.ndarray
    part: np.ndarray
    numbers: np.ndarray
    missing: np.ndarray


class Clock:
    """Whether times are numbers of no unit or dates, for all files of a table.

    The first time decides. Numbers and dates have no order among each other.
    """

    def __init__(self, schema: Schema) -> None:
        self.is_set = not schema.of_kind("time")
        """Whether the first time was found, or is not awaited."""
        self.numbers = False
        """Whether times are numbers of no unit."""

    def differing(self, times: Times, sound: np.ndarray) -> np.ndarray:
        """Where the times `sound`, bool [R], are unlike the first time of all files, bool [R]."""
        if not self.is_set and sound.any():
            self.numbers, self.is_set = bool(times.numbers[np.argmax(sound)]), True
        found: np.ndarray = sound & (times.numbers != self.numbers)
        return found


def read_times(array: Any, form: str = "", unit: str = "") -> tuple[Times, Bad]:
    """Return the points in time of a column, and the values that are none.

    Texts are read by `form`, a format of strptime, else as numbers or ISO 8601. With a `unit` of
    `TIME_UNITS` numbers count from 1970, and are dates. Raises WrongType for a type without an
    order in time, pyarrow.ArrowInvalid for typed values beyond the range of int64.
    """
    array = plain(array)
    times, bad = _of_texts(array, form) if is_text(array.type) else _of_values(array)
    if unit and times.numbers.any():
        times, beyond = _counted_in(times, unit)
        bad = [*bad, *((int(row), "is a time beyond the range of dates") for row in beyond)]
    return times, bad


def _of_values(array: Any) -> tuple[Times, Bad]:
    """The times of numbers and dates."""
    types, kind, bad = pyarrow.types, array.type, []
    missing = array.is_null().to_numpy(zero_copy_only=False)
    part = np.zeros(len(array))
    dates = types.is_timestamp(kind) or types.is_date(kind)
    if types.is_timestamp(kind) and kind.unit == "ns":
        whole, rest = np.divmod(_int64(array), 1000)
        part = rest / 1000
    elif dates:
        whole = _int64(array.cast(pyarrow.timestamp("us", getattr(kind, "tz", None))))
    elif types.is_floating(kind):
        found = array.cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
        missing = missing | np.isnan(found)
        wrong = ~missing & ~(np.abs(found) < _LARGEST)
        bad = [(int(row), f"is {found[row]:g}, beyond 2^63") for row in np.flatnonzero(wrong)]
        found = np.where(missing | wrong, 0, found)
        whole = np.floor(found).astype(np.int64)
        part = found - np.floor(found)
    elif types.is_decimal(kind):
        exact = array.cast(pyarrow.decimal256(60, kind.scale))
        below = pyarrow.compute.floor(exact)
        whole = _int64(below)
        rest = pyarrow.compute.subtract(exact, below).cast(pyarrow.float64())
        part = np.nan_to_num(rest.to_numpy(zero_copy_only=False))
    elif types.is_integer(kind) or types.is_null(kind):
        whole = _int64(array)
    else:
        raise WrongType("numbers, dates, or texts of dates")
    return Times(whole, part, np.full(len(array), not dates), missing), bad


def _int64(array: Any) -> np.ndarray:
    """The values as int64, 0 for a missing value."""
    found: np.ndarray = array.cast(pyarrow.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return found


def _of_texts(array: Any, form: str) -> tuple[Times, Bad]:
    """The times of texts: texts of one kind at once, else every text by itself."""
    rows = len(array)
    whole, part = np.zeros(rows, np.int64), np.zeros(rows)
    numbers, missing = np.zeros(rows, bool), np.zeros(rows, bool)
    bad: Bad = []
    wanted = f"not a time in the format {form}" if form else "neither a number nor a date"

    def put(places: np.ndarray, times: Times) -> None:
        whole[places], part[places] = times.whole, times.part
        numbers[places], missing[places] = times.numbers, times.missing

    for places, ways in _groups(array, form):
        texts = array.take(pyarrow.array(places))
        found = _first(ways, texts)
        if found is not None:
            put(places, found)
            continue
        for place, text in zip(places, texts.to_pylist()):
            stripped = None if text is None else text.strip()
            one = _first(ways, pyarrow.array([stripped], pyarrow.string()))
            if one is None:
                bad.append((int(place), f"is {shown(text)}, {wanted}"))
            else:
                put(np.array([place]), one)
    return Times(whole, part, numbers, missing), sorted(bad)


Way = Callable[[Any], Any]


def _groups(array: Any, form: str) -> list[tuple[np.ndarray, list[Way]]]:
    """The rows of texts read alike, and the ways to try on them."""
    if form:
        ways: list[Way] = [lambda texts: pyarrow.compute.strptime(texts, form, "us")]
        return [(np.arange(len(array)), ways)]

    def matches(pattern: str) -> np.ndarray:
        found = pyarrow.compute.match_substring_regex(array, pattern).fill_null(False)
        return np.asarray(found.to_numpy(zero_copy_only=False), bool)

    def casts(*kinds: Any) -> list[Way]:
        return [lambda texts, kind=kind: texts.cast(kind) for kind in kinds]  # type: ignore[misc]

    numbers = matches(_NUMBER)
    zoned = matches(_ZONED) & ~numbers
    stamp = pyarrow.timestamp
    groups = [
        (numbers, casts(pyarrow.int64(), pyarrow.float64())),
        (zoned, casts(stamp("us", "UTC"), stamp("ns", "UTC"))),
        (~numbers & ~zoned, casts(stamp("us"), stamp("ns"))),
    ]
    return [(np.flatnonzero(mask), ways) for mask, ways in groups if mask.any()]


def _first(ways: list[Way], texts: Any) -> Times | None:
    """The times by the first way that reads all texts, None if no way does."""
    for way in ways:
        try:
            array = way(texts)
        except pyarrow.ArrowInvalid:
            continue
        times, bad = _of_values(array)
        rounded = pyarrow.types.is_floating(array.type) and (np.abs(times.whole) >= 2**53).any()
        if not bad and not (rounded and len(texts) > 1):
            return times
    return None


def _counted_in(times: Times, unit: str) -> tuple[Times, np.ndarray]:
    """The times with numbers of a unit turned into dates, and the rows beyond int64."""
    whole, part, numbers = times.whole.copy(), times.part.copy(), times.numbers
    beyond = np.zeros(0, np.int64)
    if scale := TIME_UNITS[unit]:
        limit = (2**63 - 1) // scale - 1
        too_large = numbers & ((whole > limit) | (whole < -limit))
        beyond = np.flatnonzero(too_large)
        chosen = numbers & ~too_large
        finer = part[chosen] * scale
        whole[chosen] = whole[chosen] * scale + np.floor(finer).astype(np.int64)
        part[chosen] = finer - np.floor(finer)
    else:
        whole[numbers], rest = np.divmod(times.whole[numbers], 1000)
        part[numbers] = (rest + times.part[numbers]) / 1000
    return Times(whole, part, np.zeros_like(numbers), times.missing), beyond

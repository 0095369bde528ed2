"""The values of an Arrow column: numbers, texts, lists of them, and the values unfit for a kind.

Legend: R rows of a column, T values of all lists. `Bad` has (row or value, reason) pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ecrm.data.columns.arrow import pyarrow

Bad = list[tuple[int, str]]
_WHOLE = r"^(-?(?:0|[1-9][0-9]*))\.0*$"
"""A whole number with a point."""
_FRACTION_ZEROS = r"(?:\.0+|(\.[0-9]*[1-9])0+)(|Z|[-+][0-9:]+)$"
"""Zeros at the end of a fraction of a second, before the zone."""
_ALIKE = (
    (b".", _WHOLE, r"\1"),
    (b"True", "^True$", "true"),
    (b"False", "^False$", "false"),
)
"""Texts made alike: bytes in the text, the pattern, the text in place of the pattern."""
_MISSING_WORDS = ("nan", "null", "none", "na", "n/a")
_TRUTH_WORDS = {"true": 1.0, "false": 0.0}


class WrongType(Exception):
    """A column has a type unfit for the kind; the message says the needed type."""


def plain(array: Any) -> Any:
    """The array with a dictionary of values replaced by the values."""
    if isinstance(array, pyarrow.ChunkedArray):
        array = array.combine_chunks()
    if pyarrow.types.is_dictionary(array.type):
        return array.dictionary_decode()
    return array


def is_text(kind: Any) -> bool:
    """Whether a type is one of texts."""
    return bool(
        pyarrow.types.is_string(kind)
        or pyarrow.types.is_large_string(kind)
        or pyarrow.types.is_string_view(kind)
    )


def numbers(array: Any) -> tuple[np.ndarray, Bad]:
    """Return numbers float64 [R], NaN for a missing value, and the texts that are no numbers.

    Texts are numbers, `true` and `false`, or missing: "", nan, null, none, na and n/a, in any case.
    Raises WrongType for a type other than numbers, truth values and texts.
    """
    array, types = plain(array), pyarrow.types
    kind = array.type
    if is_text(kind):
        try:
            array = array.cast(pyarrow.float64())
        except pyarrow.ArrowInvalid:
            return _each_text(array, _number, "not a number")
    elif types.is_boolean(kind):
        array = array.cast(pyarrow.uint8())
    elif not (
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_null(kind)
    ):
        raise WrongType("numbers")
    return array.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False), []


def _number(text: str) -> float | None:
    """The number of a text, NaN for a missing value, None for a text of another kind."""
    word = text.strip().lower()
    if not word or word in _MISSING_WORDS:
        return float("nan")
    if word in _TRUTH_WORDS:
        return _TRUTH_WORDS[word]
    try:
        return float(pyarrow.scalar(word).cast(pyarrow.float64()).as_py())
    except pyarrow.ArrowInvalid:
        return None


def _each_text(
    array: Any, value_of: Callable[[str], float | None], wrong: str
) -> tuple[np.ndarray, Bad]:
    """Values float64 [R] of texts, every different text turned once; None marks a bad text."""
    encoded = array.dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    values = [value_of(text) for text in texts]
    codes = encoded.indices.fill_null(len(texts)).to_numpy(zero_copy_only=False)
    table = np.array([*(np.nan if value is None else value for value in values), np.nan])
    refused = np.array([*(value is None for value in values), False])[codes]
    bad = [(int(row), f"is {shown(texts[codes[row]])}, {wrong}") for row in np.flatnonzero(refused)]
    return table[codes], bad


def texts(array: Any) -> tuple[Any, Bad]:
    """Return the texts of values as a pyarrow.StringArray [R], null for a missing value.

    Whole numbers have no point: the number 5.0 and the texts `5.0` and `5` give `5`. Other numbers
    of a floating or decimal type are bad. NaN is missing. Truth values and the texts `True` and
    `False` give `true` and `false`. A time has no zeros at the end of the fraction. Raises
    WrongType for nested types and for bytes.
    """
    array, types, bad = plain(array), pyarrow.types, []
    kind = array.type
    if types.is_floating(kind):
        found = array.cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
        whole = (found == np.floor(found)) & (np.abs(found) < 2**63)
        wrong = ~whole & ~np.isnan(found)
        bad = [
            (int(row), f"is {found[row]:g}, not a whole number") for row in np.flatnonzero(wrong)
        ]
        array = pyarrow.array(np.where(whole, found, 0).astype(np.int64), mask=~whole)
    elif types.is_nested(kind):
        raise WrongType("one id a row")
    elif types.is_binary(kind) or types.is_large_binary(kind):
        try:
            array = array.cast(pyarrow.string())
        except pyarrow.ArrowInvalid:
            raise WrongType("texts in UTF-8, or numbers") from None
    if not types.is_string(array.type):
        array = array.cast(pyarrow.string())
    if types.is_timestamp(kind):
        return _replaced(array, ((b".", _FRACTION_ZEROS, r"\1\2"),)), bad
    array = _replaced(array, _ALIKE)
    if types.is_decimal(kind):
        broken = pyarrow.compute.match_substring(array, ".").fill_null(False)
        rows = np.flatnonzero(broken.to_numpy(zero_copy_only=False))
        bad = [(int(row), f"is {array[int(row)]}, not a whole number") for row in rows]
    return array, bad


def _replaced(array: Any, patterns: tuple[tuple[bytes, str, str], ...]) -> Any:
    """The texts with patterns replaced, each only where the bytes before the pattern are found."""
    _, offsets, data = array.buffers()
    if data is None:
        return array
    bounds = np.frombuffer(offsets, np.int32)
    first, last = bounds[array.offset], bounds[array.offset + len(array)]
    held = np.frombuffer(data, np.uint8)[first:last].tobytes()
    for needed, pattern, by in patterns:
        if needed[:1] in held and needed in held:  # one byte is found fast
            array = pyarrow.compute.replace_substring_regex(array, pattern, by)
    return array


def as_text(text: str) -> str:
    """A text of the schema as `texts` gives the text: `5.0` is `5`."""
    found: str = texts(pyarrow.array([text]))[0][0].as_py()
    return found


def lists(array: Any, separator: str, named: str = "separator") -> tuple[Any, np.ndarray]:
    """Return the values of all lists, a pyarrow.Array [T], and the lengths of the lists, int64 [R].

    Texts are divided at `separator`. A missing list is empty. Raises WrongType for a type other
    than lists and texts, and for texts without a separator.
    """
    array, types = plain(array), pyarrow.types
    kind = array.type
    if is_text(kind):
        if not separator:
            raise WrongType(f'lists, or {named} = "|" for texts such as a|b')
        array = pyarrow.compute.split_pattern(array, separator)
    elif types.is_null(kind):
        return array.slice(0, 0), np.zeros(len(array), np.int64)
    elif types.is_map(kind):
        array = array.cast(
            pyarrow.list_(pyarrow.struct([("key", kind.key_type), ("value", kind.item_type)]))
        )
    elif not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        raise WrongType(f'lists, or texts with {named} = "|"')
    lengths = pyarrow.compute.list_value_length(array).fill_null(0)
    return array.flatten(), lengths.to_numpy(zero_copy_only=False).astype(np.int64)


def pairs(values: Any, weight_separator: str) -> tuple[Any, Any, Bad]:
    """Return the ids and the weights of T pairs, two pyarrow.Arrays [T], and texts without a pair.

    A pair is a structure of two fields, or a text `id:weight` divided at the last
    `weight_separator`. Raises WrongType for values of another type.
    """
    kind = values.type
    if is_text(kind):
        parts = pyarrow.compute.split_pattern(values, weight_separator, max_splits=1, reverse=True)
        sizes = pyarrow.compute.list_value_length(parts).fill_null(0)
        sizes = sizes.to_numpy(zero_copy_only=False)
        single = {int(at): values[int(at)].as_py() for at in np.flatnonzero(sizes == 1)}
        bad = [
            (at, f"has {shown(text)}, an id without a weight")
            for at, text in single.items()
            if text
        ]
        padded = np.zeros((len(values), 2), np.int64)
        first = np.cumsum(sizes) - sizes
        padded[:, 0], padded[:, 1] = first, first + 1
        holes = sizes != 2
        parts = parts.flatten()
        ids, weights = (parts.take(pyarrow.array(padded[:, part], mask=holes)) for part in (0, 1))
        return ids, weights, bad
    if pyarrow.types.is_null(kind):
        return values, values, []
    if not pyarrow.types.is_struct(kind) or kind.num_fields != 2:
        raise WrongType("lists of pairs of an id and a weight, or a map, or weights = COLUMN")
    ids, weights = (pyarrow.compute.struct_field(values, [part]) for part in (0, 1))
    return ids, weights, []


def shown(value: object) -> str:
    """A value for a message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."

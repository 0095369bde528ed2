"""Fields of JSON objects: type, meaning and unit, and a check of objects against their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "text": (str,),
    "true or false": (bool,),
    "list": (list, tuple),
    "object": (dict,),
}
"""The types of fields, in the words of JSON, with the Python types."""


@dataclass(frozen=True)
class Field:
    """One field of an object: a type of TYPES, a meaning, and a unit, "" without a unit.

    `null` fields may be None. `optional` fields may be left out. `parts` are the fields of an
    object, or of each object of a list; without parts the content is not described.
    """

    type: str
    meaning: str
    unit: str = ""
    null: bool = False
    optional: bool = False
    parts: Mapping[str, Field] = field(default_factory=dict)


def problems(known: Mapping[str, Field], given: Mapping[str, Any]) -> list[str]:
    """The problems of an object that should have the `known` fields, a line each."""
    wrong = [
        f"{name} is missing"
        for name, wanted in known.items()
        if name not in given and not wanted.optional
    ]
    for name, value in given.items():
        if name not in known:
            wrong.append(f"{name} is not described")
        elif not _fits(known[name], value):
            wrong.append(f"{name} is {value!r}, not {known[name].type}")
        elif known[name].parts and value is not None:
            for entry in [value] if isinstance(value, dict) else value:
                wrong += [f"{name}: {why}" for why in problems(known[name].parts, entry)]
    return wrong


def _fits(wanted: Field, value: Any) -> bool:
    if value is None:
        return wanted.null
    is_bool = isinstance(value, bool)
    return isinstance(value, TYPES[wanted.type]) and is_bool == (wanted.type == "true or false")

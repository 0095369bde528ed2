"""Events for tests: made of a few fields, or noted as in events.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ecrm.engine.events import Event, fields_of

Kind = TypeVar("Kind", bound=Event)

FILLERS: dict[str, Any] = {
    "integer": 0,
    "number": 0.0,
    "text": "",
    "true or false": False,
    "list": [],
    "object": {},
}


def an(kind: type[Kind], /, **given: Any) -> Kind:
    """An event with the given fields, and empty values for all other fields."""
    rest = {name: FILLERS[field.type] for name, field in fields_of(kind).items()}
    optional = {name for name, field in fields_of(kind).items() if field.optional}
    needed = {name: value for name, value in rest.items() if name not in optional}
    return kind(**{**needed, **given})


def noted_in(events: list[dict[str, Any]]) -> Callable[[Event], None]:
    """A hook that appends each event as in events.jsonl, without the time."""
    return lambda told: events.append(told.to_dict())

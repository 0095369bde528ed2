"""Whole numbers that a script gives: of Python, numpy or torch."""

from __future__ import annotations

import operator
from typing import Any

from ecrm.errors import UsageError


def whole(value: Any, said: str, least: int, otherwise: str = "") -> int:
    """The number as one of Python's; `said` is how a script says it, such as "Session(slots".

    Raises UsageError where it is none, or below `least`; `otherwise` ends the latter message.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{said}={value!r}): give a whole number") from None
    if number < least:
        needed = "are" if least == 0 and "workers" in said else "is"
        raise UsageError(f"{said}={number}): at least {least} {needed} needed{otherwise}")
    return number

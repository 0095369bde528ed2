"""Whole numbers given by a script: of Python, numpy or torch."""

from __future__ import annotations

import operator
from typing import Any

from ecrm.base.errors import UsageError


def whole(value: Any, said: str, least: int, otherwise: str = "") -> int:
    """The number as a Python int; `said` is the script's wording, such as "Session(slots".

    Raises UsageError for anything but a whole number, and below `least`; `otherwise` ends the
    latter message.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{said}={value!r}): give a whole number") from None
    if number < least:
        needed = "are" if least == 0 and "workers" in said else "is"
        raise UsageError(f"{said}={number}): at least {least} {needed} needed{otherwise}")
    return number

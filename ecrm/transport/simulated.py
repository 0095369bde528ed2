"""The former name of `ecrm.testing.simulated_transport`, without its modules; leaves with 0.3.0."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

_NOW = "ecrm.testing.simulated_transport"


def __getattr__(name: str) -> Any:
    """A name of the package, with a DeprecationWarning."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_NOW), name)
    warnings.warn(f"{__name__} is {_NOW} now", DeprecationWarning, stacklevel=2)
    return found

"""The way from a run to `ecrm.testing`: a part is loaded by name, when a config asks for it.

No module of a run imports test doubles or injected faults.
"""

from __future__ import annotations

import importlib
from typing import Any


def testing_part(name: str) -> Any:
    """The module `ecrm.testing.NAME`. Only `--kill` and keys of `testing` lead here."""
    return importlib.import_module(f"ecrm.testing.{name}")

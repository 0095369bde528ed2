"""Training of recommendation models, with embedding tables that survive the death of servers.

Scripts use `import ecrm`, then `ecrm.Session`. Heavy modules are loaded at the first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecrm.data.columns.table import Table
    from ecrm.session.data import Indexed
    from ecrm.session.session import Session
    from ecrm.session.streams import Streams
    from ecrm.tables.collections import EmbeddingBagCollection, EmbeddingCollection

__version__ = "0.2.0"

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "Indexed",
    "Session",
    "Streams",
    "Table",
]

_HOMES = {
    "EmbeddingBagCollection": "ecrm.tables.collections",
    "EmbeddingCollection": "ecrm.tables.collections",
    "Indexed": "ecrm.session.data",
    "Session": "ecrm.session.session",
    "Streams": "ecrm.session.streams",
    "Table": "ecrm.data.columns.table",
}


_MODULES = ("nn", "ops")


def __getattr__(name: str) -> Any:
    if name in _HOMES or name == "nn":
        from ecrm.base.requirements import require_torchrec

        require_torchrec()
    if name in _MODULES:
        return importlib.import_module(f"ecrm.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

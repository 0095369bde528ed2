"""Imports a program of `benchmarks/` as Python finds it when that program is started."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def program(name: str) -> ModuleType:
    """The module benchmarks/NAME.py, with the modules beside it in reach."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    return importlib.import_module(name)

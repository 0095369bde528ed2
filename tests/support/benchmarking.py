"""Imports a program of `benchmarks/` as Python finds it when that program is started."""

from __future__ import annotations

import csv
import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from support.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


def program(name: str) -> ModuleType:
    """The module benchmarks/NAME.py, with the modules beside it in reach."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    return importlib.import_module(name)


def read(path: Path) -> list[dict[str, str]]:
    """The lines of a benchmark's CSV.

    Its tables and, if it has one, its figure are made from them.
    """
    figures, tables = program("lib.figures"), program("lib.tables")
    if path.stem in figures.FIGURES:
        with tempfile.TemporaryDirectory() as folder:
            drawn = Path(folder, f"{path.stem}.png")
            figures.picture(figures.FIGURES[path.stem], path, drawn)
            assert figures.stale(path, drawn) is None
    made = [
        tables.content(name, path.parent)
        for name, table in tables.TABLES.items()
        if table.csv == path.name
    ]
    assert any(text.startswith("|") for text in made)
    return list(csv.DictReader(path.open()))


MEASURED_ON = ("device", "cores", "torch", "openmpi", "ecrm_commit")


def measured(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV, which say what they were measured on."""
    lines = read(path)
    assert all(line[column] for line in lines for column in MEASURED_ON)
    return lines

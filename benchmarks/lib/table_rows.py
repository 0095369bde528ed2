"""Rows of the CSV files of benchmarks/results, and Markdown tables of what is told of them."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from lib.ratios import Row


class TableError(Exception):
    """A document or a CSV file that cannot be made sense of; one line."""


def read_rows(path: Path) -> list[dict[str, str]] | None:
    """The rows of a CSV file; None if there is no such file.

    Raises TableError if it has no rows.
    """
    if not path.exists():
        return None
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise TableError(f"{path} has no rows: write it anew with its benchmark")
    return rows


def groups(rows: Sequence[Row], *fields: str) -> dict[tuple[str, ...], list[Row]]:
    """Rows by the values of `fields`, as text, in the order in which these first appear."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(str(row[field]) for field in fields), []).append(row)
    return found


def numbers(rows: Iterable[Row], field: str) -> list[float]:
    """What the rows have in that column."""
    return [float(row[field]) for row in rows]


def spread(values: Sequence[float], digits: int = 0) -> str:
    """`median (least to greatest)`; the median alone where these look the same."""
    low, middle, high = (
        f"{value:,.{digits}f}" for value in (min(values), statistics.median(values), max(values))
    )
    return middle if low == high else f"{middle} ({low} to {high})"


def source(rows: Sequence[Row], csv: str) -> str:
    """Where rows come from: the CSV file, what they were measured on, and the commits."""
    labels = {
        "device": "{}",
        "cores": "{} cores",
        "instruction_set": "{}",
        "torch": "torch {}",
        "openmpi": "Open MPI {}",
        "ecrm_commit": "commit {}",
        "commit": "commit {}",
    }
    parts = []
    for column, label in labels.items():
        values = dict.fromkeys(str(row[column]) for row in rows if row.get(column))
        if values:
            parts.append(label.format(" and ".join(values)))
    return ": ".join([csv, *([", ".join(parts)] if parts else [])])


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [
        f"| {' | '.join(header)} |",
        "|---" * len(header) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]

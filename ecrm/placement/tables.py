"""Embedding tables and the row spaces they are laid out in."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """One embedding table of `rows` rows of `dim` floats."""

    name: str
    rows: int
    dim: int


@dataclass(frozen=True)
class RowSpace:
    """Tables of one row width laid end to end; `offsets[i]` is the first row of `tables[i]`.

    `table_numbers[i]` is the table's position in the model's list: rows are initialised by it.
    """

    dim: int
    tables: tuple[Table, ...]
    table_numbers: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: int

    def in_words(self, rows: Collection[int]) -> str:
        """Some row numbers of the space, told by their tables."""
        by_table: dict[int, list[int]] = {}
        for row in sorted(rows):
            table = bisect_right(self.offsets, row) - 1
            by_table.setdefault(table, []).append(row - self.offsets[table])
        (table, found), *others = sorted(by_table.items())
        words = f"row {found[0]} of table {self.tables[table].name}"
        if len(found) > 1:
            words = f"{len(found)} rows of table {self.tables[table].name}, row {found[0]} first"
        return words + (f", and rows of {len(others)} more tables" if others else "")


def row_spaces(tables: Sequence[Table]) -> tuple[RowSpace, ...]:
    """Group tables by row width, in order of first appearance."""
    by_dim: dict[int, list[tuple[int, Table]]] = {}
    for number, table in enumerate(tables):
        by_dim.setdefault(table.dim, []).append((number, table))
    spaces = []
    for dim, members in by_dim.items():
        offsets, total = [], 0
        for _, table in members:
            offsets.append(total)
            total += table.rows
        spaces.append(
            RowSpace(
                dim,
                tuple(t for _, t in members),
                tuple(n for n, _ in members),
                tuple(offsets),
                total,
            )
        )
    return tuple(spaces)

"""Embedding tables, and the row spaces with the tables laid end to end."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ecrm.base.errors import UsageError
from ecrm.placement.initial_values import Initial
from ecrm.placement.sparse_optimizer import SparseOptimizer

MOST_ROWS = 1.1
"""Rows of the fullest shard over an even share, above which one more table is spread.

All shards have the size of the fullest, so this bounds the memory that whole tables add.
"""


@dataclass(frozen=True)
class Table:
    """One embedding table of `rows` rows of `dim` floats.

    `optimizer` updates the rows, by default the run's own. Rows begin with `initial`, by default
    uniform in [-1/sqrt(rows), 1/sqrt(rows)). A sample looks up `lookups` ids on average; the places
    of whole tables depend on the number.
    """

    name: str
    rows: int
    dim: int
    optimizer: SparseOptimizer | None = None
    initial: Initial | None = None
    lookups: float = 1.0


@dataclass(frozen=True)
class RowSpace:
    """Tables of one row width and optimizer laid end to end.

    `offsets[i]` is the first row of `tables[i]`. `table_numbers[i]` is the table's position in the
    model's list, used for the initial values. `optimizer` is `None` for the run's own.
    """

    dim: int
    optimizer: SparseOptimizer | None
    tables: tuple[Table, ...]
    table_numbers: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: int

    def in_words(self, rows: Collection[int]) -> str:
        """Some row numbers of the space in words, as rows of tables."""
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
    """Group tables by row width and optimizer, in order of first appearance.

    Optimizers are the same if names and all numbers are. Raises UsageError if two tables have one
    name.
    """
    twice = [name for name, count in Counter(table.name for table in tables).items() if count > 1]
    if twice:
        raise UsageError(f"two tables have the name {twice[0]}: each table needs its own")
    alike: dict[tuple[int, SparseOptimizer | None], list[tuple[int, Table]]] = {}
    for number, table in enumerate(tables):
        alike.setdefault((table.dim, table.optimizer), []).append((number, table))
    spaces = []
    for (dim, optimizer), members in alike.items():
        offsets, total = [], 0
        for _, table in members:
            offsets.append(total)
            total += table.rows
        spaces.append(
            RowSpace(
                dim,
                optimizer,
                tuple(t for _, t in members),
                tuple(n for n, _ in members),
                tuple(offsets),
                total,
            )
        )
    return tuple(spaces)

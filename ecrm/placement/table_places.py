"""Whole tables on shards: the place of every row if tables are not cut row by row.

A large table is spread over all shards, row after row, as all tables are without this module. Any
other table lies whole on a shard, and its bags can be summed there. Stripes and parity know local
row numbers alone, and are the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ecrm.placement.tables import MOST_ROWS, RowSpace

SPREAD = -1
"""In place of a shard: the table is spread over all shards."""


class TablePlaces:
    """The places of the tables of one row space.

    Args:
        rows: Rows of every table, in the order of the row space.
        homes: The shard of every table, or SPREAD.
        shards: The number of shards.
    """

    def __init__(self, rows: Sequence[int], homes: Sequence[int], shards: int) -> None:
        self.homes, self._shards, self._rows = tuple(homes), shards, sum(rows)
        filled, first, at_row, at_local = [0] * shards, 0, [], []
        blocks: list[list[tuple[int, int]]] = [[] for _ in range(shards)]  # (local row, table)
        for table, (count, home) in enumerate(zip(rows, homes, strict=True)):
            at_row.append(first)
            first += count
            if home != SPREAD:
                at_local.append(filled[home])
                blocks[home].append((filled[home], table))
                filled[home] += count
        # spread tables come last, from one local row on, on all shards alike
        end = max(filled)
        for table, (count, home) in enumerate(zip(rows, homes, strict=True)):
            if home == SPREAD:
                at_local.insert(table, end)
                for of_shard in blocks:
                    of_shard.append((end, table))
                end += -(-count // shards)
        self.rows_per_shard = end
        """Local rows of a shard, with the padding behind its tables."""
        self._at_row, self._at_local = torch.tensor(at_row), torch.tensor(at_local)
        self._counts, self._homes = torch.tensor(list(rows)), torch.tensor(list(homes))
        self._blocks = [
            (torch.tensor([at for at, _ in mine]), torch.tensor([table for _, table in mine]))
            for mine in blocks
        ]

    def tables_of(self, rows: Tensor) -> Tensor:
        """The table of every row, int64 [R], by its place in the row space."""
        return torch.bucketize(rows, self._at_row, right=True) - 1

    def bounds_in(self, rows: Tensor) -> list[int]:
        """The place of every table's first row among ascending rows, int64 [R], and R."""
        return [*torch.searchsorted(rows, self._at_row).tolist(), rows.numel()]

    def locate(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Shard and local row number of rows, int64 [R]."""
        table = self.tables_of(rows)
        home, within = self._homes[table], rows - self._at_row[table]
        spread = home == SPREAD
        return (
            torch.where(spread, (within + table) % self._shards, home),
            self._at_local[table] + torch.where(spread, within // self._shards, within),
        )

    def split(self, rows: Tensor) -> tuple[list[int], Tensor, Tensor]:
        """Split rows, int64 [R], by shard, as `RowLayout.split` does."""
        if bool((rows.diff() <= 0).any()):
            return self._sorted(rows)
        # of ascending rows, those of a table follow each other
        bounds, numbers = self.bounds_in(rows), torch.arange(rows.numel())
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self._shards)]
        firsts, locals_ = self._at_row.tolist(), self._at_local.tolist()
        for table, home in enumerate(self.homes):
            here = slice(bounds[table], bounds[table + 1])
            if here.start == here.stop:
                continue
            if home != SPREAD:
                shift = locals_[table] - firsts[table]
                found[home].append((numbers[here], rows[here] + shift))
                continue
            counts, places, local = self._sorted(rows[here])
            parts = zip(places.split(counts), local.split(counts), strict=True)
            for of_shard, (place, part) in zip(found, parts, strict=True):
                of_shard.append((place + here.start, part))
        none = rows[:0]
        places, local = (
            torch.cat([none, *(pair[which] for of_shard in found for pair in of_shard)])
            for which in (0, 1)
        )
        return [sum(len(place) for place, _ in each) for each in found], places, local

    def _sorted(self, rows: Tensor) -> tuple[list[int], Tensor, Tensor]:
        """As `split`, of rows in any order."""
        shard, local = self.locate(rows)
        # numpy sorts numbers of two bytes by radix
        places = torch.from_numpy(np.argsort(shard.numpy().astype(np.uint16), kind="stable"))
        return torch.bincount(shard, minlength=self._shards).tolist(), places, local[places]

    def rows_of(self, shard: int, local: Tensor) -> Tensor:
        """Row numbers of a shard's local rows, int64 [R]; numbers of padding are no row's."""
        starts, tables = self._blocks[shard]
        padding = self._rows + shard * self.rows_per_shard + local
        if not tables.numel():
            return padding
        block = (torch.bucketize(local, starts, right=True) - 1).clamp_(min=0)
        table = tables[block]
        within = local - starts[block]
        turned = within * self._shards + (shard - table) % self._shards
        within = torch.where(self._homes[table] == SPREAD, turned, within)
        known = (within >= 0) & (within < self._counts[table])
        return torch.where(known, self._at_row[table] + within, padding)


def place_tables(spaces: Sequence[RowSpace], shards: int) -> tuple[TablePlaces, ...]:
    """The places of all tables: shards even by rows and by lookups.

    The measures of a table are its rows, within the row space, and its lookups, over all row
    spaces, as shares of an even shard. Tables with the largest sum first, each goes to the shard
    whose fuller measure is least afterwards. The tables of most rows are spread until no
    shard has more than MOST_ROWS of an even share.
    """
    held = [0.0] * shards
    places = []
    even = sum(table.lookups for space in spaces for table in space.tables) / shards
    for space in spaces:
        rows = [table.rows for table in space.tables]
        lookups = [table.lookups / even for table in space.tables]
        largest = sorted(range(len(rows)), key=lambda table: (-rows[table], table))
        for spread in range(len(rows) + 1):
            homes, filled, looked_up = _homes(rows, lookups, largest[:spread], list(held), shards)
            if max(filled) <= MOST_ROWS * sum(rows) / shards or spread == len(rows):
                break
        held = looked_up
        places.append(TablePlaces(rows, homes, shards))
    return tuple(places)


def _homes(
    rows: Sequence[int],
    lookups: Sequence[float],
    spread: Sequence[int],
    held: list[float],
    shards: int,
) -> tuple[list[int], list[float], list[float]]:
    """Homes with some tables spread, and rows and lookups by shard.

    `held` are the lookups of earlier row spaces by shard. Lookups are shares of an even shard.
    """
    homes = [SPREAD] * len(rows)
    filled = [sum(rows[table] for table in spread) / shards] * shards
    held = [share + sum(lookups[table] for table in spread) / shards for share in held]
    even = sum(rows) / shards
    whole = sorted(
        set(range(len(rows))) - set(spread),
        key=lambda table: (-(rows[table] / even + lookups[table]), table),
    )
    for table in whole:
        home = min(
            range(shards),
            key=lambda shard: (
                max((filled[shard] + rows[table]) / even, held[shard] + lookups[table]),
                filled[shard],
            ),
        )
        homes[table] = home
        filled[home] += rows[table]
        held[home] += lookups[table]
    return homes, filled, held

"""The row spaces of the outputs of a collection, and the rows asked for by ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from ecrm.base.errors import DataError, StrayId
from ecrm.placement.tables import RowSpace

_ID_TYPES = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Entry:
    """A feature looked up in a table of `rows` rows.

    `number` is the feature's place in the output of the collection. `first` is the table's first
    row in its row space. `pooling` is `sum` or `mean`, and empty for rows without pooling.
    """

    number: int
    feature: str
    table: str
    rows: int
    pooling: str
    first: int = 0
    place: int = 0

    def may_look_up(self, ids: Tensor) -> bool:
        """Whether ids, [n], are int64 or int32, and all in the table.

        No ids at all pass, and so do ids on the meta device, without values.
        """
        if not ids.numel() or ids.is_meta:
            return True
        if ids.dtype not in _ID_TYPES:
            return False
        lowest, highest = torch.aminmax(ids)
        return int(lowest) >= 0 and int(highest) < self.rows

    def check(self, jagged: JaggedTensor) -> None:
        """Raise DataError for ids neither int64 nor int32, StrayId for an id not in the table."""
        ids = jagged.values()
        if self.may_look_up(ids):
            return
        if ids.dtype not in _ID_TYPES:
            raise DataError(
                f'ids of feature "{self.feature}" are {ids.dtype}, '
                "needed: torch.int64 or torch.int32"
            )
        place = int(((ids < 0) | (ids >= self.rows)).nonzero()[0])
        raise StrayId(
            f"{self.in_words(jagged, place)} is not in table {self.table}, "
            f"whose ids are 0 to {self.rows - 1}"
        )

    def in_words(self, jagged: JaggedTensor, place: int) -> str:
        """Describe the id at a place of the feature's values, with its sample."""
        ends = jagged.lengths().cumsum(0)
        sample = int(torch.searchsorted(ends, place, right=True))
        return f'feature "{self.feature}" of sample {sample}: id {int(jagged.values()[place])}'

    def within(self, ids: Tensor) -> Tensor:
        """The ids in the table, in order; empty for ids neither int64 nor int32."""
        if ids.dtype not in _ID_TYPES:
            return torch.empty(0, dtype=torch.int64)
        return ids[(ids >= 0) & (ids < self.rows)]

    def row_numbers(self, ids: Tensor) -> Tensor:
        """The row numbers in the row space, int64 [n], of ids, [n], of the table."""
        numbers: Tensor = ids.long()
        return numbers + self.first if self.first else numbers


@dataclass(frozen=True)
class Group:
    """Entries of the same row space and pooling, looked up by a single operation."""

    space: int
    pooling: str
    entries: tuple[Entry, ...]

    @cached_property
    def features(self) -> list[str]:
        """The features of the entries."""
        return [entry.feature for entry in self.entries]

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        """The numbers of rows of the tables, [F], and the first rows in the space, [F, 1]."""
        return (
            torch.tensor([entry.rows for entry in self.entries]),
            torch.tensor([[entry.first] for entry in self.entries]),
        )

    def start_in(self, keys: Sequence[str]) -> int:
        """The place in `keys` from which all features follow in order.

        -1 for no such place, and for keys with a key twice.
        """
        if self.features[0] not in keys or len(set(keys)) != len(keys):
            return -1
        first = keys.index(self.features[0])
        return first if keys[first : first + len(self.features)] == self.features else -1

    def row_numbers(self, kjt: KeyedJaggedTensor) -> Tensor | None:
        """The row numbers of all ids, int64 [n], feature after feature, by few operations.

        `None` unless all features follow each other in `kjt` with equally many usable ids, on the
        CPU, and the lengths add up to the ids.
        """
        values, start = kjt.values(), self.start_in(kjt.keys())
        if start < 0 or not values.is_cpu or values.dtype not in _ID_TYPES:
            return None
        counts = kjt.length_per_key()
        if not isinstance(counts, list) or sum(counts) != values.numel():
            return None
        here = counts[start : start + len(self.features)]
        if here[0] == 0 or here.count(here[0]) != len(here):
            return None
        begin = sum(counts[:start])
        ids = values[begin : begin + sum(here)].view(len(here), -1)
        lowest, highest = torch.aminmax(ids, dim=1)
        rows, firsts = self._bounds
        if bool((lowest < 0).any()) or bool((highest >= rows).any()):
            return None
        numbers: Tensor = (ids + firsts).view(-1)
        return numbers


@dataclass(frozen=True)
class Layout:
    """The outputs of a collection by groups. `number` tells collections apart.

    `weighted`: whether ids have weights.
    """

    number: int
    groups: tuple[Group, ...]
    weighted: bool = False

    @classmethod
    def of(
        cls,
        number: int,
        entries: Iterable[tuple[str, Entry]],
        spaces: Sequence[RowSpace],
        weighted: bool = False,
    ) -> Layout:
        """Make the layout from entries, paired with table names of the row spaces."""
        homes = {
            table.name: (space, first, place)
            for space, row_space in enumerate(spaces)
            for place, (table, first) in enumerate(zip(row_space.tables, row_space.offsets))
        }
        groups: dict[tuple[int, str], list[Entry]] = {}
        for name, entry in entries:
            space, first, place = homes[name]
            entry = replace(entry, first=first, place=place)
            groups.setdefault((space, entry.pooling), []).append(entry)
        found = tuple(Group(*key, tuple(members)) for key, members in groups.items())
        return cls(number, found, weighted)


def check_ids(entries: Iterable[Entry], features: Mapping[str, JaggedTensor]) -> None:
    """Raise for ids not looked up by the entries, as `Entry.check` does.

    Raises KeyError for a missing feature.
    """
    for entry in entries:
        entry.check(features[entry.feature])

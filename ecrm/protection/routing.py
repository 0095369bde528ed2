"""Routing of rows: slots ask shards for unique rows and send gradients the same way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from ecrm.device.copies import on_device, on_host
from ecrm.kernels.bag_sum import RowPieces
from ecrm.kernels.pieces import Piece, PieceTable, copy_pieces
from ecrm.kernels.scatter_add import scatter_add
from ecrm.kernels.unit_order import unique_by_unit
from ecrm.placement.stripes import RowLayout
from ecrm.placement.view import View
from ecrm.protection.pooled import (
    AskedBags,
    BagValues,
    ShardBags,
    SlotBags,
    SummedBags,
    asked_bags,
    bits_of,
    number_of,
)
from ecrm.protection.stand_in import StandIn
from ecrm.protection.wire_dtype import EXACT, Wire, round_to
from ecrm.storage.hosted import HostedShard, ShardSpace
from ecrm.transport.inbox import Groups, Inbox
from ecrm.transport.message import (
    Part,
    Picked,
    Received,
    gathered,
    in_groups,
    matrix,
    matrix_on,
)
from ecrm.transport.outbox import Outbox, Spread

# Kinds of groups: the first word of a group's head, if several kinds travel together.
(
    ROWS,
    GRADIENTS,
    DENSE,
    STOP,
    REPAIR,
    SOON,
    COMPUTED,
    NOTE,
    TROUBLE,
    SLOT_STATE,
    OVER,
    MARK,
    ENDS,
    BAGS,
    SUMS,
    BAG_GRADIENTS,
    JOIN,
) = range(17)


RowMemory = Callable[[int, int], Tensor]
"""(rows, floats per row) -> memory for the rows on the CPU, float32, holding anything."""


@dataclass(frozen=True)
class FoundRows(RowPieces):
    """Rows found for a slot, where shards or a stand-in left the rows.

    Valid until the next exchange, share or shrink of this rank. Rows of bags in `summed` did not
    come: pieces have zeros in their place.
    """

    memory: RowMemory
    summed: Sequence[SummedBags] = ()
    rounded_to: torch.dtype = torch.float32

    def copied(self) -> Tensor:
        """The rows in one place, float32 [U, dim], in memory from `memory`; none are `summed`."""
        assert not self.summed, "rows of summed bags did not come"
        return self.copy_into(self.memory(self.rows, self.dimension))

    def copy_into(self, out: Tensor) -> Tensor:
        """As in `RowPieces`, rounded."""
        return round_to(super().copy_into(out), self.rounded_to)


Place = tuple[int, int, int]
"""(slot, shard, row space) numbers."""


@dataclass(frozen=True)
class Split:
    """Rows asked for by a slot, by shard.

    Legend: S shards with rows, R rows.

    Args:
        shards: int64 [S], ascending.
        counts: The rows of each shard, int64 [S].
        places: Shard by shard, the places among the rows asked for, int64 [R].
        local: Shard by shard, the local rows, int64 [R].
    """

    shards: np.ndarray
    counts: np.ndarray
    places: Tensor
    local: Tensor

    @classmethod
    def of(cls, layout: RowLayout, wanted: Tensor) -> Split:
        """`wanted`, int64 [R], by shard."""
        of_shards, places, local = layout.split(wanted)
        counts = np.array(of_shards, np.int64)
        shards = counts.nonzero()[0]
        return cls(shards, counts[shards], places, local)

    def parts(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The shard, the places and the local rows of every shard."""
        counts = self.counts.tolist()
        return zip(
            self.shards.tolist(), self.places.split(counts), self.local.split(counts), strict=True
        )

    def among(self, shards: Collection[int], there: bool = True) -> Split:
        """The part of some shards, or without `there` the part of all others."""
        if not shards:  # the rule: no shard is away
            return (
                Split(self.shards[:0], self.counts[:0], self.places[:0], self.local[:0])
                if there
                else self
            )
        chosen = np.isin(self.shards, list(shards)) == there
        if chosen.all():
            return self
        rows = torch.from_numpy(np.repeat(chosen, self.counts))
        return Split(self.shards[chosen], self.counts[chosen], self.places[rows], self.local[rows])

    def spread(
        self, kind: int, slot: int, space: int, hosts: np.ndarray, payload: Tensor | Picked
    ) -> Spread:
        """Groups headed (kind, slot, shard, space), to the host of each shard."""
        heads = np.empty((len(self.shards), 4), np.int64)
        heads[:, 0], heads[:, 1], heads[:, 2], heads[:, 3] = kind, slot, self.shards, space
        counts = self.counts if payload.numel() else np.zeros_like(self.counts)
        return Spread(hosts[self.shards], heads, counts, payload)


Splits = dict[tuple[int, int], Split]
"""By slot and space."""


def _zeros(rows: int, width: int, came: Sequence[Tensor]) -> Piece:
    """Zeros for all of `rows` rows but the rows that `came`, places of int64."""
    left = torch.ones(rows, dtype=torch.bool)
    for place in came:
        left[place] = False
    to = left.nonzero().squeeze(1)
    return Piece(torch.zeros(1, width), 0, torch.zeros_like(to), to)


class SlotRequests:
    """The slots' side of a step: unique rows of every slot on this rank, split by shard.

    `rows[slot][space]` are unique row numbers of a row space, int64; `widths[space]` are the floats
    of a row. Rows of shards that are away are asked of `stand_in` instead. `computed` slots have
    gradients already and want no values.
    """

    def __init__(
        self,
        rows: dict[int, list[Tensor]],
        widths: Sequence[int],
        parts: Splits,
        away: Splits,
        view: View,
        stand_in: StandIn | None,
        computed: Collection[int],
        bags: Mapping[Place, AskedBags] = MappingProxyType({}),
        wire: Wire = EXACT,
    ) -> None:
        self._rows, self._widths, self._parts, self._away = rows, widths, parts, away
        self._view, self._stand_in, self._computed = view, stand_in, computed
        self._bags, self._wire = bags, wire
        self._with_bags = {(slot, space) for slot, _, space in bags}

    @classmethod
    def of(
        cls,
        rows: Mapping[int, Sequence[Tensor]],
        layouts: Sequence[RowLayout],
        widths: Sequence[int],
        view: View,
        stand_in: StandIn | None = None,
        computed: Collection[int] = (),
        bags: Mapping[int, Sequence[SlotBags | None]] = MappingProxyType({}),
        pools: Callable[[int], bool] = lambda rank: False,
        wire: Wire = EXACT,
    ) -> SlotRequests:
        """The requests for `rows[slot][space]`, unique row numbers, int64 [U]; U may be 0.

        `bags[slot][space]` are the bags of the rows, ascending then. `pools(rank)`: whether bags
        may be asked of the rank's shards.
        """
        shards_away = frozenset() if stand_in is None else stand_in.away
        in_order = {slot: list(spaces) for slot, spaces in sorted(rows.items())}
        parts: Splits = {}
        away: Splits = {}
        for slot, spaces in in_order.items():
            for space, wanted in enumerate(spaces):
                split = Split.of(layouts[space], wanted)
                parts[slot, space] = split.among(shards_away, there=False)
                away[slot, space] = split.among(shards_away)
        asked: dict[Place, AskedBags] = {}
        for slot, of_slot in bags.items():
            for space, of_space in enumerate(of_slot):
                if of_space is None:
                    continue
                found = asked_bags(
                    layouts[space],
                    in_order[slot][space],
                    of_space,
                    [(shard, place) for shard, place, _ in parts[slot, space].parts()],
                    widths[space],
                    lambda shard: pools(view.shards[shard]),
                )
                asked |= {(slot, shard, space): each for shard, each in found.items()}
        return cls(in_order, widths, parts, away, view, stand_in, computed, asked, wire)

    def sums_elsewhere(self, slot: int, space: int) -> bool:
        """Whether a shard sums bags of a slot's rows."""
        return (slot, space) in self._with_bags

    def requests(self) -> Outbox:
        """Message per shard host: (kind, slot, shard, space), local rows.

        The kind is ROWS, or COMPUTED for slots without need of values. Bags follow their rows:
        (BAGS, slot, shard, space, R), words of `AskedBags`.
        """
        hosts, outgoing = np.array(self._view.shards, np.int64), Outbox()
        for (slot, space), split in self._parts.items():
            kind = COMPUTED if slot in self._computed else ROWS
            if not self.sums_elsewhere(slot, space):
                outgoing.spread(split.spread(kind, slot, space, hosts, split.local))
                continue
            for shard, _, local in split.parts():
                message: list[Part] = [(kind, slot, shard, space), local]
                if bags := self._bags.get((slot, shard, space)):
                    message += ((BAGS, slot, shard, space, bags.bags.numel()), bags.words)
                outgoing.add(self._view.shards[shard], *message)
        return outgoing

    def of_shards(self, shards: Collection[int]) -> list[Received]:
        """The requests of slots with results to some shards, as in `requests`."""
        asked: list[Received] = []
        for (slot, space), split in self._parts.items():
            for shard, _, local in split.among(shards).parts():
                asked += ((COMPUTED, slot, shard, space), local)
        return asked

    def again(self, view: View) -> SlotRequests:
        """The same requests in a different view, with all slots `computed`.

        New hosts of rebuilding shards know of no bags.
        """
        computed = frozenset(self._rows)
        bags = {key: each for key, each in self._bags.items() if key[1] not in view.rebuilding}
        return SlotRequests(
            self._rows,
            self._widths,
            self._parts,
            self._away,
            view,
            self._stand_in,
            computed,
            bags,
            self._wire,
        )

    def local(self, slot: int, shard: int, space: int) -> Tensor:
        """The local rows asked of a shard by a slot, in the order asked, int64."""
        ((_, _, local),) = self._parts[slot, space].among((shard,)).parts()
        return local

    def _table(
        self, split: Split, slot: int, space: int, came: Mapping[int, Sequence[Received]]
    ) -> PieceTable | None:
        """The pieces of a slot's rows, if `came` tells without objects where all of them lie."""
        if not isinstance(came, Groups):
            return None
        keys, width = came.words, self._widths[space]
        chosen = ((keys[:, 1] == slot) & (keys[:, 3] == space)).nonzero()[0]
        of_shard = np.full(len(self._view.shards), -1)
        of_shard[keys[chosen, 2]] = chosen
        at = of_shard[split.shards]
        rows = came.rows(at, split.counts) if (at >= 0).all() else None
        if rows is None:
            return None
        if (rows.widths != width).any():
            _refuse_width(int(rows.widths[rows.widths != width][0]), torch.float32, width)
        numbers = np.zeros((len(at), 7), np.int64)
        numbers[:, 0], numbers[:, 1], numbers[:, 2] = rows.sources, rows.heights, 4 * width
        numbers[:, 4] = rows.picked
        ahead = split.counts.cumsum() - split.counts
        numbers[:, 5] = split.places.data_ptr() + split.places.element_size() * ahead
        numbers[:, 6] = split.counts
        return PieceTable(numbers, (split.places, rows.kept))

    @staticmethod
    def found(
        *replies: Mapping[int, Sequence[Received]],
    ) -> dict[tuple[int, int, int], Tensor | Picked]:
        """{(slot, shard, space): rows in the order asked, float32}."""
        came = (tensors for some in replies for tensors in some.values())
        return {
            head[1:]: rows
            for tensors in came
            for head, rows in in_groups(tensors, 2)
            if head[0] == ROWS
        }

    def collect(
        self,
        *replies: Mapping[int, Sequence[Received]],
        remember: bool = True,
        memory: RowMemory = torch.empty,
    ) -> dict[int, list[FoundRows]]:
        """Rows of every slot not `computed`, by space, in the order asked, not yet copied.

        The rows come from all `replies` together, and copies will lie in memory from `memory`. With
        `remember`, a stand-in remembers the rows received, and counts the rows given in place of a
        shard.
        """
        found: dict[Place, Tensor | Picked] | None = None
        came = [some for some in replies if some]
        summed = self._summed(*came) if self._with_bags else {}
        result: dict[int, list[FoundRows]] = {
            slot: [] for slot in self._rows if slot not in self._computed
        }
        for (slot, space), split in self._parts.items():
            if slot not in result:
                continue
            wanted, width = self._rows[slot][space], self._widths[space]
            elsewhere = self.sums_elsewhere(slot, space)
            if len(came) == 1 and self._stand_in is None and not elsewhere:
                table = self._table(split, slot, space, came[0])
                if table is not None:
                    result[slot].append(
                        FoundRows(wanted.numel(), width, table, memory, rounded_to=self._wire.dtype)
                    )
                    continue
            found = self.found(*came) if found is None else found
            pieces: list[tuple[Tensor, Tensor, Tensor | None]] = []
            sums: list[SummedBags] = []
            for shard, place, _ in split.parts():
                bags = self._bags.get((slot, shard, space))
                if bags is not None:
                    sums.append(SummedBags(bags.bags, summed[slot, shard, space]))
                    place = place[bags.rest]
                if place.numel():
                    rows, picked = matrix(found[slot, shard, space], place.numel())
                    pieces.append((place, self._whole(rows), picked))
            if self._stand_in is not None:
                for place, piece, picked in pieces if remember else ():
                    self._stand_in.saw(space, wanted[place], piece, picked)
                given = (
                    (place, self._stand_in.values(shard, space, wanted[place], count=remember))
                    for shard, place, _ in self._away[slot, space].parts()
                )
                pieces += [(place, values, None) for place, values in given]
            for _, piece, _ in pieces:
                if piece.shape[1] != width or piece.dtype != torch.float32:
                    _refuse_width(piece.shape[1], piece.dtype, width)
            of_pieces = [Piece(rows, 0, picked, place) for place, rows, picked in pieces]
            if sums:
                of_pieces.append(_zeros(wanted.numel(), width, [place for place, *_ in pieces]))
            result[slot].append(
                FoundRows(wanted.numel(), width, of_pieces, memory, sums, self._wire.dtype)
            )
        return result

    def _whole(self, rows: Tensor) -> Tensor:
        """Rows as float32, if the rows came in the dtype of the wire."""
        return rows.float() if rows.dtype == self._wire.dtype else rows

    def _summed(self, *replies: Mapping[int, Sequence[Received]]) -> dict[Place, Tensor]:
        """Sums of bags, float32 [R, dim], by (slot, shard, space)."""
        came = (tensors for some in replies for tensors in some.values())
        return {
            head[1:]: self._whole(gathered(values)).view(-1, self._widths[head[3]])
            for tensors in came
            for head, values in in_groups(tensors, 2)
            if head[0] == SUMS
        }

    def gradients(
        self,
        gradients: Mapping[int, Sequence[Tensor]],
        sit_out: Collection[int] = (),
        of_bags: Mapping[int, Mapping[int, BagValues]] = MappingProxyType({}),
    ) -> Outbox:
        """Message per shard host: (GRADIENTS, slot, shard, space), gradients in requested order.

        Slots in `sit_out` send empty gradients. If bags were asked, and `of_bags[slot][space]` has
        their gradients, these go in place of the gradients of the bags' rows: (BAG_GRADIENTS, slot,
        shard, space, bits of the divisor), gradients of the bags.
        """
        hosts, outgoing = np.array(self._view.shards, np.int64), Outbox()
        for (slot, space), split in self._parts.items():
            values = of_bags.get(slot, {}).get(space)
            if slot in sit_out:
                nothing = torch.empty(0)
                outgoing.spread(split.spread(GRADIENTS, slot, space, hosts, nothing))
                continue
            of_rows = gradients[slot][space]
            if values is None or not self.sums_elsewhere(slot, space):
                for dtype, part in self._by_dtype(split):
                    payload = Picked(of_rows.to(dtype), part.places)
                    outgoing.spread(part.spread(GRADIENTS, slot, space, hosts, payload))
                continue
            forms, forms_of_bags = Forms(of_rows), Forms(values.values)
            for shard, place, _ in split.parts():
                rank, message = self._view.shards[shard], list[Part]()
                dtype = self._wire.of_values(rank)
                if bags := self._bags.get((slot, shard, space)):
                    head = (BAG_GRADIENTS, slot, shard, space, bits_of(values.divisor))
                    message += (head, Picked(forms_of_bags.of(dtype), bags.bags))
                    place = place[bags.rest]
                message += ((GRADIENTS, slot, shard, space), Picked(forms.of(dtype), place))
                outgoing.add(rank, *message)
        return outgoing

    def _by_dtype(self, split: Split) -> Iterator[tuple[torch.dtype, Split]]:
        """The parts of a split whose gradients travel alike."""
        if self._wire.dtype == torch.float32:
            yield torch.float32, split
            return
        dtypes = [self._wire.of_values(self._view.shards[shard]) for shard in split.shards]
        for dtype in dict.fromkeys(dtypes):
            pairs = zip(split.shards.tolist(), dtypes, strict=True)
            yield dtype, split.among([shard for shard, of_shard in pairs if of_shard == dtype])

    def keep(
        self,
        gradients: Mapping[int, Sequence[Tensor]],
        step: int,
        sit_out: Collection[int] = (),
    ) -> None:
        """Leave a step's gradients for shards that are away to the stand-in.

        Slots in `sit_out` have no gradients.
        """
        if self._stand_in is None:
            return
        for slot in sorted(self._rows.keys() - set(sit_out)):
            parts: dict[int, list[tuple[int, Tensor, Tensor]]] = {
                shard: [] for shard in self._stand_in.away
            }
            for space in range(len(self._rows[slot])):
                for shard, place, local in self._away[slot, space].parts():
                    parts[shard].append(
                        (space, local, gradients[slot][space].index_select(0, place))
                    )
            for shard, of_shard in parts.items():
                self._stand_in.keep(shard, step, slot, of_shard)


def _refuse_width(came: int, dtype: torch.dtype, width: int) -> NoReturn:
    raise ValueError(f"rows of {came} {dtype} came for rows of {width} {torch.float32}")


@dataclass(frozen=True)
class _Asked:
    """Unique local rows asked of a hosted shard and space.

    Legend: U unique rows, R rows asked by n slots.

    Args:
        rows: int64 [U], in the order of `unique_by_unit`.
        slots: int64 [n], ascending.
        counts: The rows asked by each slot, int64 [n].
        all_places: Slot by slot, the places of the slot's rows in `rows`, int64 [R].
    """

    rows: Tensor
    slots: np.ndarray
    counts: np.ndarray
    all_places: Tensor

    @classmethod
    def of(cls, slots: np.ndarray, counts: np.ndarray, local: Tensor, units: int) -> _Asked:
        """`local` rows asked, slot by slot, int64 [R]."""
        rows, places = unique_by_unit(local, units)
        return cls(rows, slots, counts, places)

    @cached_property
    def places(self) -> list[tuple[int, Tensor]]:
        """The places of each slot's rows in `rows`, by slot."""
        split = self.all_places.split(self.counts.tolist())
        return list(zip(self.slots.tolist(), split, strict=True))


def _merged(parts: list[tuple[int, Tensor]], units: int) -> _Asked:
    slots, counts = ([slot for slot, _ in parts], [local.numel() for _, local in parts])
    local = torch.cat([local for _, local in parts])
    return _Asked.of(np.array(slots, np.int64), np.array(counts, np.int64), local, units)


class GroupedGradients(Mapping[Place, Tensor | Picked]):
    """Gradients from groups headed (GRADIENTS, slot, shard, space), without an object for each."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def of_slots(self, shard: int, space: int, slots: np.ndarray, counts: np.ndarray) -> Tensor:
        """The gradients of `counts` rows for each of `slots`, float32 [R, dim], slot by slot.

        Empty [0, 0] if a slot sits out, or if only objects tell where all gradients lie.
        """
        words = self._groups.words
        chosen = ((words[:, 2] == shard) & (words[:, 3] == space)).nonzero()[0]
        chosen = chosen[words[chosen, 1].argsort(kind="stable")]
        here = np.array_equal(words[chosen, 1], slots)
        some = here and bool((counts * self._groups.lengths[chosen]).all())
        rows = self._groups.rows(chosen, counts) if some else None
        if rows is None or (rows.widths != rows.widths[0]).any():
            return torch.empty(0, 0)
        numbers, size = np.zeros((len(chosen), 7), np.int64), 4 * rows.widths[0]
        together = rows.picked == 0  # all rows of a matrix, in order, are one row
        numbers[:, 0], numbers[:, 4] = rows.sources, rows.picked
        numbers[:, 1] = np.where(together, 1, rows.heights)
        numbers[:, 2] = np.where(together, size * counts, size)
        numbers[:, 3] = size * (counts.cumsum() - counts)
        numbers[:, 6] = np.where(together, 1, counts)
        values = torch.empty(int(counts.sum()), int(rows.widths[0]))
        copy_pieces(values, PieceTable(numbers, (rows.kept,)))
        return values

    @cached_property
    def _found(self) -> dict[Place, Tensor | Picked]:
        return {
            head[1:]: payload
            for tensors in self._groups.values()
            for head, payload in in_groups(tensors, 2)
        }

    def __getitem__(self, place: Place) -> Tensor | Picked:
        return self._found[place]

    def __iter__(self) -> Iterator[Place]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class Forms:
    """Values, float32, and forms of other dtypes, each made once when wanted."""

    def __init__(self, values: Tensor) -> None:
        self._forms = {values.dtype: values}

    def of(self, dtype: torch.dtype) -> Tensor:
        """The values in a dtype."""
        if dtype not in self._forms:
            self._forms[dtype] = self._forms[torch.float32].to(dtype)
        return self._forms[dtype]


class ShardRequests:
    """The shards' side of a step: the rows asked of the shards on this rank by every slot."""

    def __init__(
        self,
        asked: dict[ShardSpace, _Asked],
        ranks: dict[int, int],
        waiting: Set[int],
        hosted: Mapping[ShardSpace, HostedShard],
        bags: Mapping[Place, ShardBags] = MappingProxyType({}),
        wire: Wire = EXACT,
    ) -> None:
        self._asked, self._ranks, self._waiting, self._hosted = asked, ranks, waiting, hosted
        self._bags, self._wire = bags, wire
        self._late: list[ShardSpace] = []

    @classmethod
    def of(
        cls,
        messages: Mapping[int, Sequence[Received]],
        hosted: Mapping[ShardSpace, HostedShard],
        wire: Wire = EXACT,
    ) -> ShardRequests:
        """The requests in `messages`, by sender, to the shards `hosted` on this rank."""
        if isinstance(messages, Groups) and (found := cls._of_groups(messages, hosted, wire)):
            return found
        ranks: dict[int, int] = {}
        waiting: set[int] = set()
        asked: dict[ShardSpace, list[tuple[int, Tensor]]] = {}
        bags: dict[Place, ShardBags] = {}
        for rank, tensors in messages.items():
            for head, local in in_groups(tensors, 2):
                if head[0] == MARK:
                    continue
                if head[0] == BAGS:  # follows its rows
                    rows = asked[head[2:4]][-1][1].numel()
                    bags[head[1:4]] = ShardBags.of(local, head[4], rows)
                    continue
                kind, slot, shard, space = head
                ranks[slot] = rank
                if kind == ROWS:
                    waiting.add(slot)
                asked.setdefault((shard, space), []).append((slot, local))
        merged = {
            key: _merged(sorted(parts, key=lambda part: part[0]), hosted[key].units)
            for key, parts in asked.items()
        }
        return cls(merged, ranks, waiting, hosted, bags, wire)

    @classmethod
    def _of_groups(
        cls, groups: Groups, hosted: Mapping[ShardSpace, HostedShard], wire: Wire
    ) -> ShardRequests | None:
        """The same without an object for each request; `None` if some need objects."""
        groups = groups.among(groups.words[:, 0] != MARK)
        words, numbers = groups.words, groups.numbers()
        kinds, slots, shards, spaces = words.T
        if numbers is None or not ((kinds == ROWS) | (kinds == COMPUTED)).all():
            return None
        ranks = dict(zip(slots.tolist(), groups.senders.tolist()))
        merged = {}
        for shard, space in dict.fromkeys(zip(shards.tolist(), spaces.tolist())):
            chosen = ((shards == shard) & (spaces == space)).nonzero()[0]
            chosen = chosen[slots[chosen].argsort(kind="stable")]
            counts = numbers.counts[chosen]
            pieces = np.zeros((len(chosen), 7), np.int64)
            pieces[:, 0], pieces[:, 1], pieces[:, 2] = numbers.addresses[chosen], 1, 8 * counts
            pieces[:, 3], pieces[:, 6] = 8 * (counts.cumsum() - counts), 1
            local = torch.empty(int(counts.sum()), dtype=torch.int64)
            copy_pieces(local, PieceTable(pieces, (numbers.kept,)))
            units = hosted[shard, space].units
            merged[shard, space] = _Asked.of(slots[chosen], counts, local, units)
        waiting = set(slots[kinds == ROWS].tolist())
        return cls(merged, ranks, waiting, hosted, wire=wire)

    def again(
        self, told: Mapping[int, Sequence[Received]], hosted: Mapping[ShardSpace, HostedShard]
    ) -> ShardRequests:
        """The same requests by slots with results, and the requests `told` to new shards."""
        mine = {
            rank: [part for pair in in_groups(tensors, 2) if pair[0][2:] in hosted for part in pair]
            for rank, tensors in told.items()
        }
        new = ShardRequests.of(mine, hosted, self._wire)
        kept = {key: asked for key, asked in self._asked.items() if key in hosted}
        ranks = {**self._ranks, **new._ranks}
        bags = {key: each for key, each in self._bags.items() if key[1:] in kept}
        asked = {**kept, **new._asked}
        return ShardRequests(asked, ranks, new._waiting, hosted, bags, self._wire)

    def missing(self) -> dict[ShardSpace, Tensor]:
        """Unique missing rows asked for, to be recovered before the update, by shard and space."""
        return self._missing_of(self._ranks)

    def awaited(self) -> dict[ShardSpace, Tensor]:
        """Rows of `missing` with a waiting slot."""
        return self._missing_of(self._waiting)

    def unawaited(self) -> dict[ShardSpace, Tensor]:
        """Rows of `missing` asked for by a slot with results."""
        return self._missing_of(self._ranks.keys() - self._waiting)

    def _missing_of(self, slots: Collection[int]) -> dict[ShardSpace, Tensor]:
        missing = {}
        for key, asked in self._asked.items():
            places = [place for slot, place in asked.places if slot in slots]
            if places:
                rows = (
                    asked.rows
                    if len(places) == len(asked.places)
                    else asked.rows[torch.cat(places).unique()]
                )
                missing[key] = self._hosted[key].missing_among(rows)
        return {key: rows for key, rows in missing.items() if rows.numel()}

    def askers(self, shard: int, space: int, rows: Tensor) -> dict[int, tuple[int, Tensor]]:
        """The slots asking a shard, with the places of `rows`, unique int64 [R], in the requests.

        {slot: (rank of the slot, place of every row in the slot's request or -1, int64 [R])}. Only
        for shards with a single data unit per stripe.
        """
        asked = self._asked.get((shard, space))
        if asked is None or not asked.rows.numel():
            return {}
        assert self._hosted[shard, space].units == 1, "rows must ascend"
        at = torch.searchsorted(asked.rows, rows).clamp_(max=asked.rows.numel() - 1)
        known = asked.rows[at] == rows
        result = {}
        for slot, place in asked.places:
            of_row = torch.full_like(asked.rows, -1)
            of_row[place] = torch.arange(place.numel())
            result[slot] = self._ranks[slot], torch.where(known, of_row[at], -1)
        return result

    def replies(self) -> Outbox:
        """Message per waiting slot's rank: (ROWS, slot, shard, space), rows in the order asked.

        Of bags asked: (SUMS, slot, shard, space), sums of the bags, in place of the bags' rows.
        Without rows of a shard and space with awaited rows missing.
        """
        self._late = list(self.awaited())
        return self._replies(key for key in self._asked if key not in self._late)

    def late_replies(self) -> Outbox:
        """The rest of `replies`, after the recovery of all awaited rows."""
        return self._replies(self._late)

    def _replies(self, keys: Iterable[ShardSpace]) -> Outbox:
        outgoing = Outbox()
        for shard, space in keys:
            asked = self._asked[shard, space]
            waits = np.isin(asked.slots, list(self._waiting))
            if not waits.any():
                continue
            rows = self._hosted[shard, space].lookup(asked.rows)
            forms = Forms(rows)
            if not self._bags:
                for dtype, alike in self._by_dtype(asked, waits):
                    outgoing.spread(self._spread(asked, alike, shard, space, forms.of(dtype)))
                continue
            for slot, place in asked.places:
                if slot not in self._waiting:
                    continue
                rank = self._ranks[slot]
                if bags := self._bags.get((slot, shard, space)):
                    sums = bags.pooled(rows, place, self._wire.dtype)
                    sums = sums.to(self._wire.of_values(rank))
                    outgoing.add(rank, (SUMS, slot, shard, space), sums)
                    place = place[bags.rest]
                if place.numel():
                    sent = forms.of(self._wire.of_rows(rank))
                    outgoing.add(rank, (ROWS, slot, shard, space), Picked(sent, place))
        return outgoing

    def _by_dtype(
        self, asked: _Asked, waits: np.ndarray
    ) -> Iterator[tuple[torch.dtype, np.ndarray]]:
        """The slots that wait, bool [n], by the dtype of their rows on the way."""
        if self._wire.dtype == torch.float32:
            yield torch.float32, waits
            return
        dtypes = [self._wire.of_rows(self._ranks[slot]) for slot in asked.slots.tolist()]
        for dtype in dict.fromkeys(dtypes):
            yield dtype, waits & np.array([of_slot == dtype for of_slot in dtypes])

    def _spread(
        self, asked: _Asked, waits: np.ndarray, shard: int, space: int, rows: Tensor
    ) -> Spread:
        """`rows` for the slots that wait, bool [n], and that asked for some."""
        waits = waits & (asked.counts > 0)
        slots, counts, places = asked.slots[waits], asked.counts[waits], asked.all_places
        if not waits.all():
            places = places[torch.from_numpy(waits.repeat(asked.counts))]
        heads = np.empty((len(slots), 4), np.int64)
        heads[:, 0], heads[:, 1], heads[:, 2], heads[:, 3] = ROWS, slots, shard, space
        ranks = np.array([self._ranks[slot] for slot in slots.tolist()], np.int64)
        return Spread(ranks, heads, counts, Picked(rows, places))

    def update(
        self,
        gradients: Mapping[tuple[int, int, int], Tensor | Picked],
        keep_deltas: bool,
        step: int,
        of_bags: Mapping[Place, tuple[Tensor | Picked, float]] = MappingProxyType({}),
    ) -> None:
        """Sum gradients in slot order and run the optimizer of `step` on every shard asked.

        `gradients[slot, shard, space]` are in the order of the rows requested, float32 or in the
        dtype of the wire; empty for a slot that sits out. `of_bags`, by the same keys, has
        gradients of bags, with divisors: `gradients` are then of the remaining rows. Rows asked for
        only by slots that sit out stay unchanged.
        """
        for (shard, space), asked in self._asked.items():
            hosted = self._hosted[shard, space]
            device = hosted.store.device
            sums = hosted.gradient_space(asked.rows.numel(), keep_deltas)
            # `sums` needs no zeros: every row is asked by a slot, whose first gradient is stored
            seen = torch.zeros(asked.rows.numel(), dtype=torch.uint8, device=device)
            whole = True
            if sums.is_cpu and not of_bags and isinstance(gradients, GroupedGradients):
                values = gradients.of_slots(shard, space, asked.slots, asked.counts)
                if values.numel():
                    scatter_add(sums, asked.all_places, values, seen=seen)
                    hosted.update(asked.rows, sums, keep_deltas, step)
                    continue
            for slot, place in asked.places:
                came = gradients[slot, shard, space]
                if (slot, shard, space) in of_bags:
                    bags = self._bags[slot, shard, space]
                    came_of_bags, divisor = of_bags[slot, shard, space]
                    of_rows = bags.gradients(came_of_bags, divisor, device, self._wire.dtype)
                    at = on_device(device, place[bags.summed])
                    scatter_add(sums, at, of_rows, seen=seen, picked=None, unique=True)
                    place = place[bags.rest]
                    if not place.numel():
                        continue
                elif place.numel() and not came.numel():
                    whole = False
                    continue
                values, picked = matrix_on(device, came, place.numel())
                places = on_device(device, place)
                scatter_add(sums, places, values.float(), seen=seen, picked=picked, unique=True)
            if whole:
                hosted.update(asked.rows, sums, keep_deltas, step)
            else:
                _update_some(hosted, asked.rows, sums, seen, keep_deltas, step)

    def pass_over(self, keep_deltas: bool) -> None:
        """Log a step without a change of rows, for every shard asked."""
        for key, asked in self._asked.items():
            self._hosted[key].pass_over(asked.rows, keep_deltas)


def _update_some(
    hosted: HostedShard, rows: Tensor, sums: Tensor, seen: Tensor, keep_deltas: bool, step: int
) -> None:
    """Update the rows marked in `seen`, uint8 [R], and log the rest as unchanged."""
    (updated,) = on_host(seen.bool())
    kept = sums[on_device(sums.device, updated)]  # a copy: the memory is used again
    space = hosted.gradient_space(len(kept), keep_deltas)
    hosted.update(rows[updated], space.copy_(kept), keep_deltas, step)
    hosted.pass_over(rows[~updated], keep_deltas)


def asked_of(told: Mapping[int, Sequence[Received]]) -> dict[ShardSpace, Tensor]:
    """Unique local rows asked of every shard and space, int64, from the slots' messages."""
    asked: dict[ShardSpace, list[Tensor]] = {}
    for tensors in told.values():
        for head, local in in_groups(tensors, 2):
            asked.setdefault(head[2:], []).append(local)
    return {key: unique_by_unit(torch.cat(rows), 1)[0] for key, rows in sorted(asked.items())}


def soon_requests(
    rows: Mapping[int, Sequence[Tensor]], layouts: Sequence[RowLayout], view: View
) -> dict[int, list[Part]]:
    """Message per host of a rebuilding shard: (SOON, shard, space), local rows.

    The local rows are the shard's part of `rows[slot][space]`.
    """
    outgoing: dict[int, list[Part]] = {}
    for spaces in rows.values():
        for space, wanted in enumerate(spaces):
            shards, local = layouts[space].locate(wanted)
            for shard in view.rebuilding:
                outgoing.setdefault(view.shards[shard], []).extend(
                    ((SOON, shard, space), local[shards == shard])
                )
    return outgoing


@dataclass(frozen=True)
class StepResults:
    """The messages of slots in a step's first exchange.

    `gradients` by (slot, shard, space), and `of_bags`, gradients of bags with divisors; `dense`,
    {slot: slice of the contribution}; `notes`, {slot: note}; `states`, {slot: state}; `requests`,
    {rank: requests for the next step}; `soon`, {(shard, space): list of local rows for the step
    after the next, a tensor per slot}; `troubles`, {slot: trouble}; `stopping`, ranks asking to
    stop; `over`, slots without a part in the next step; `ends`, steps before which training is to
    end; `joins`, ranks that know of ranks waiting to join.
    """

    gradients: Mapping[Place, Tensor | Picked]
    dense: dict[int, Tensor]
    notes: dict[int, Tensor]
    states: dict[int, Tensor]
    requests: Mapping[int, list[Received]]
    soon: dict[ShardSpace, list[Tensor]]
    troubles: dict[int, str]
    stopping: set[int]
    over: set[int]
    ends: set[int]
    joins: set[int]
    of_bags: dict[Place, tuple[Tensor | Picked, float]]

    @classmethod
    def of(cls, received: Mapping[int, Sequence[Received]]) -> StepResults:
        if isinstance(received, Inbox):
            groups = received.groups()
            kinds = groups.words[:, 0]
            asks, gives = np.isin(kinds, (ROWS, COMPUTED, MARK, BAGS)), kinds == GRADIENTS
            others = cls.of(dict(groups.among(~(asks | gives))))
            gradients = GroupedGradients(groups.among(gives))
            return replace(others, gradients=gradients, requests=groups.among(asks))
        gradients_found: dict[Place, Tensor | Picked] = {}
        requests: dict[int, list[Received]] = {}
        found = cls(gradients_found, {}, {}, {}, requests, {}, {}, set(), set(), set(), set(), {})
        for rank, tensors in received.items():
            for head, payload in in_groups(tensors, 2):
                kind, key = head[0], head[1:]
                if kind == GRADIENTS:
                    gradients_found[key] = payload
                elif kind == BAG_GRADIENTS:
                    found.of_bags[key[:3]] = payload, number_of(key[3])
                elif kind == DENSE:
                    found.dense[key[0]] = payload
                elif kind == NOTE:
                    found.notes[key[0]] = payload
                elif kind == SLOT_STATE:
                    found.states[key[0]] = payload
                elif kind == SOON:
                    found.soon.setdefault(key, []).append(payload)
                elif kind == STOP:
                    found.stopping.add(rank)
                elif kind == JOIN:
                    found.joins.add(rank)
                elif kind == OVER:
                    found.over.add(key[0])
                elif kind == ENDS:
                    found.ends.add(key[0])
                elif kind == TROUBLE:
                    found.troubles[key[0]] = bytes(payload.tolist()).decode()
                else:
                    requests.setdefault(rank, []).extend((head, payload))
        return found


@dataclass(frozen=True)
class StepReplies:
    """The messages attached by ranks to a step's second exchange.

    `replies`, {rank: rows of the next step}; `dense`, {holder: the holder's slice of the sum};
    `repairs`, {rank: requests of the round of repair}.
    """

    replies: Mapping[int, list[Received]]
    dense: dict[int, Tensor]
    repairs: dict[int, list[Received]]

    @classmethod
    def of(cls, arrived: Mapping[int, Sequence[Received]]) -> StepReplies:
        if isinstance(arrived, Inbox):
            groups = arrived.groups()
            kinds = groups.words[:, 0]
            others = cls.of(dict(groups.among((kinds == DENSE) | (kinds == REPAIR))))
            rows = groups.among((kinds != DENSE) & (kinds != REPAIR))
            return cls(rows, others.dense, others.repairs)
        replies: dict[int, list[Received]] = {}
        found = cls(replies, {}, {})
        for rank, tensors in arrived.items():
            for head, payload in in_groups(tensors, 2):
                kind = head[0]
                if kind == DENSE:
                    found.dense[rank] = payload
                else:
                    (found.repairs if kind == REPAIR else replies).setdefault(rank, []).extend(
                        (head, payload)
                    )
        return found

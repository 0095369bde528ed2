"""Bags summed at the shard of their rows: sums travel in place of rows, in both directions.

Row-wise sharding spreads a bag over the shards, and every row of the bag travels. A table whole on
a shard needs no rows at the slot: the shard sums each bag, in the order of the bag's ids, and sends
the sum. In return the slot sends the gradient of each bag, and the shard sums the gradients of a
row's bags, in the order of the row's uses. Slot and shard sum by the same kernels, so the bits are
the same on either way.

The slot chooses. A shard whose memory the slot can read sends rows, without a copy. For any other
shard the slot chooses by table, by bytes.

Legend: U rows asked of a shard by a slot, D floats of a row, R bags, n uses of the rows in bags.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ecrm.device.copies import on_device, on_host
from ecrm.kernels.bag_sum import bag_sum
from ecrm.kernels.segment_sum import segment_sum
from ecrm.kernels.unit_order import Uses, unique_with_uses
from ecrm.placement.stripes import RowLayout
from ecrm.transport.message import Picked, matrix

FLOAT_BYTES = NUMBER_BYTES = 4
"""Bytes of a float of a row, and of a number in a list of bags."""


class SlotBags(NamedTuple):
    """The bags of a slot's batch over one row space: sums of rows, the only use of the rows.

    Args:
        tables: The table of every feature, by its place in the row space.
        bags: The number of bags of every feature.
        uses: The number of uses in the bags of every feature.
        lengths: int64, the number of uses in every bag, feature after feature.
        places: int64, for every use, bag after bag, the place among the slot's unique rows.
    """

    tables: Sequence[int]
    bags: Sequence[int]
    uses: Sequence[int]
    lengths: Tensor
    places: Tensor


class BagValues(NamedTuple):
    """Gradients of all bags of a slot over one row space.

    Args:
        values: float32, a row for every bag of `SlotBags`.
        divisor: Sums of a row's gradients are divided by this number.
    """

    values: Tensor
    divisor: float


class SummedBags(NamedTuple):
    """Sums of some bags of a slot, as sent by a shard.

    Args:
        bags: int64 [R], the places among all bags of `SlotBags`.
        values: float32 [R, D].
    """

    bags: Tensor
    values: Tensor


@dataclass(frozen=True)
class AskedBags:
    """The bags that a slot asks of a shard.

    `bags`, int64 [R], are places among all bags of `SlotBags`. `rest`, int64, are the places, among
    the U rows asked, of rows that travel themselves. `words`, int32 [R + n], is for the message:
    the number of uses in every bag, then the place of every use among the U rows.
    """

    bags: Tensor
    rest: Tensor
    words: Tensor


@dataclass(frozen=True)
class ShardBags:
    """Bags asked of a shard by a slot, as known to the shard.

    `lengths`, int64 [R], is the number of uses in every bag; `places`, int64 [n], is the place of
    every use among the `rows` rows asked by the slot.
    """

    lengths: Tensor
    places: Tensor
    rows: int

    @classmethod
    def of(cls, words: Tensor, bags: int, rows: int) -> ShardBags:
        """The bags in a message of `AskedBags`."""
        lengths, places = words.long().split([bags, words.numel() - bags])
        return cls(lengths.contiguous(), places.contiguous(), rows)

    @cached_property
    def _sorted(self) -> tuple[Tensor, Uses]:
        """The places of rows in bags, int64, ascending, and the uses of these rows."""
        places, _, uses = unique_with_uses(self.places, 1)
        return places, uses

    @property
    def summed(self) -> Tensor:
        """The places, among the rows asked, of rows in bags, int64, ascending."""
        return self._sorted[0]

    @cached_property
    def rest(self) -> Tensor:
        """The places, among the rows asked, of all other rows, int64."""
        alone = torch.ones(self.rows, dtype=torch.bool)
        alone[self.summed] = False
        return alone.nonzero().squeeze(1)

    def pooled(
        self, rows: Tensor, place: Tensor, rounded_to: torch.dtype = torch.float32
    ) -> Tensor:
        """Sums of the bags, float32 [R, D]; the slot's row i is `rows[place[i]]`.

        Rows and sums are rounded to a dtype.
        """
        (here,) = on_host(rows)
        return bag_sum(here, place[self.places], self.lengths, rounded_to=rounded_to)

    def gradients(
        self,
        came: Tensor | Picked,
        divisor: float,
        device: torch.device,
        rounded_to: torch.dtype = torch.float32,
    ) -> Tensor:
        """Gradients of the rows `summed`, float32 [., D], from the gradients of the bags.

        Each gradient of a row is rounded to a dtype.
        """
        places, uses = self._sorted
        values, picked = matrix(came, self.lengths.numel())
        (values,) = on_host(values.float())
        bags = torch.repeat_interleave(self.lengths)
        sums = torch.empty(places.numel(), values.shape[1])
        numbers = bags if picked is None else picked[bags]
        segment_sum(sums, uses, values, numbers, divisor, rounded_to=rounded_to)
        return on_device(device, sums)


def asked_bags(
    layout: RowLayout,
    wanted: Tensor,
    bags: SlotBags,
    parts: Collection[tuple[int, Tensor]],
    dim: int,
    pools: Callable[[int], bool],
) -> dict[int, AskedBags]:
    """The bags to ask of shards, by shard.

    `wanted`, int64, are the slot's unique rows, ascending. `parts` are the shards asked for rows,
    with the places of the rows in `wanted`. `pools(shard)`: whether bags may be asked of the shard.
    """
    if layout.places is None or not wanted.numel():
        return {}
    firsts = layout.places.bounds_in(wanted)
    by_home: dict[int, dict[int, list[int]]] = {}
    for feature, table in enumerate(bags.tables):
        by_home.setdefault(layout.places.homes[table], {}).setdefault(table, []).append(feature)
    found = {}
    for shard, place in parts:
        if shard not in by_home or not pools(shard):
            continue
        chosen: list[int] = []
        alone = torch.ones(place.numel(), dtype=torch.bool)
        shift: dict[int, int] = {}
        for table, features in by_home[shard].items():
            first, end = firsts[table], firsts[table + 1]
            count = sum(bags.bags[feature] for feature in features)
            numbers = count + sum(bags.uses[feature] for feature in features)
            by_rows = 2 * FLOAT_BYTES * dim * (end - first)
            if 2 * FLOAT_BYTES * dim * count + NUMBER_BYTES * numbers >= by_rows:
                continue
            chosen += features
            begin = int(torch.searchsorted(place, first))
            shift[table] = begin - first
            alone[begin : begin + end - first] = False
        if chosen:
            found[shard] = _asked(bags, sorted(chosen), shift, alone)
    return found


def _asked(
    bags: SlotBags, chosen: Sequence[int], shift: dict[int, int], alone: Tensor
) -> AskedBags:
    """The `chosen` features' bags; `shift` turns places among the slot's rows, by table."""
    lengths, places = bags.lengths.split(list(bags.bags)), bags.places.split(list(bags.uses))
    numbers = torch.arange(bags.lengths.numel()).split(list(bags.bags))
    words = [lengths[number] for number in chosen]
    words += [places[number] + shift[bags.tables[number]] for number in chosen]
    return AskedBags(
        torch.cat([numbers[number] for number in chosen]),
        alone.nonzero().squeeze(1),
        torch.cat(words).to(torch.int32),
    )


def bits_of(number: float) -> int:
    """The bits of a number, for a head."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def number_of(bits: int) -> float:
    """The number with these bits."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])

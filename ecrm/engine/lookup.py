"""A lookup of rows, alone or with the messages of the step before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ecrm.placement.stripes import RowLayout
from ecrm.placement.tables import RowSpace
from ecrm.placement.view import View
from ecrm.protection.base import Protection, RepairRound
from ecrm.protection.pooled import SlotBags
from ecrm.protection.routing import (
    MARK,
    FoundRows,
    RowMemory,
    ShardRequests,
    SlotRequests,
    StepReplies,
    asked_of,
    soon_requests,
)
from ecrm.protection.wire_dtype import EXACT, Wire
from ecrm.storage.hosted import HostedShard, ShardSpace
from ecrm.transport.message import Received
from ecrm.transport.outbox import Outbox, to_all

Bags = Mapping[int, Sequence[SlotBags | None]]
"""Bags by slot and row space; `None` for rows with another use."""


@dataclass(frozen=True)
class LookupContext:
    """The data of this rank used by a lookup.

    `widths[space]` are the floats of a row of every row space. `hosted` are this rank's shards;
    `rebuild_rows` is the number of rows rebuilt in the background per step. Values for slots lie in
    `memory`. `pools(rank)`: whether bags may be asked of the rank's shards. `wire` is the form of
    rows and gradients on the way.
    """

    view: View
    layouts: Sequence[RowLayout]
    widths: Sequence[int]
    hosted: Mapping[ShardSpace, HostedShard]
    protection: Protection
    rebuild_rows: int
    memory: RowMemory = torch.empty
    pools: Callable[[int], bool] = lambda rank: False
    wire: Wire = EXACT

    @property
    def repairs_ahead(self) -> bool:
        """Whether a round of repair can be begun with a lookup; the same on all ranks."""
        return bool(self.view.rebuilding) and self.protection.repairs_ahead


class Lookup:
    """The slots' and the shards' side of a lookup on this rank.

    `repair` is the round of repair begun with the lookup, or `None`; `repair_goes_with_results`:
    whether the round's answers are sent with the step's results. Every live rank calls `requests`,
    `receive_requests`, `replies` and `receive_replies` in order, and exchanges the results of the
    first and the third. The slots' `rows` may then be collected, once.
    """

    def __init__(
        self,
        context: LookupContext,
        slot_side: SlotRequests,
        soon: Mapping[int, Sequence[Tensor]] | None = None,
        marks: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._context, self.slot_side, self._marks = context, slot_side, marks
        self._soon = soon if context.repairs_ahead else None
        self.shard_side = ShardRequests({}, {}, frozenset(), context.hosted, wire=context.wire)
        self.repair: RepairRound | None = None
        self.repair_goes_with_results = False
        self._came: Mapping[int, list[Received]] = {}

    @classmethod
    def of(
        cls,
        context: LookupContext,
        rows: Mapping[int, Sequence[Tensor]],
        soon: Mapping[int, Sequence[Tensor]] | None = None,
        computed: Collection[int] = (),
        marks: Mapping[int, int] = MappingProxyType({}),
        bags: Bags = MappingProxyType({}),
    ) -> Lookup:
        """A lookup of `rows[slot][space]`; `soon` are the likely rows of the next lookup.

        `marks` are digests of the slots' batches, for the ranks asked. `bags[slot][space]` are the
        bags of the rows, ascending then: shards may sum the bags in place of sending rows.
        """
        stand_in = context.protection.stand_in
        slot_side = SlotRequests.of(
            rows,
            context.layouts,
            context.widths,
            context.view,
            stand_in,
            computed,
            bags,
            context.pools,
            context.wire,
        )
        return cls(context, slot_side, soon, marks)

    def again(self, context: LookupContext, told: Mapping[int, Sequence[Received]]) -> Lookup:
        """The same lookup for slots with results, after the loss of shards.

        `told[rank]` are the requests of the rank's slots to the lost shards. No message is needed:
        `rows` may be collected at once.
        """
        lookup = Lookup(context, self.slot_side.again(context.view))
        lookup.shard_side = self.shard_side.again(told, context.hosted)
        if context.view.rebuilding:
            soon = {key: rows for key, rows in asked_of(told).items() if rows.numel()}
            lookup.repair = context.protection.foresee_repair(soon, context.view)
        return lookup

    def requests(self) -> Outbox:
        """The requests of this rank's slots to shards, and `soon` rows to rebuilding shards."""
        outgoing = self.slot_side.requests()
        ranks = outgoing.ranks
        for slot, digest in self._marks.items():
            outgoing.spread(to_all(ranks, (MARK, slot, digest)))
        for rank, tensors in (
            soon_requests(self._soon, self._context.layouts, self._context.view).items()
            if self._soon is not None
            else ()
        ):
            outgoing.add(rank, *tensors)
        return outgoing

    def receive_requests(self, requests: Mapping[int, Sequence[Received]]) -> None:
        """Take the requests of slots to this rank's shards."""
        context = self._context
        self.shard_side = ShardRequests.of(requests, context.hosted, context.wire)

    def replies(self, soon: Mapping[ShardSpace, Sequence[Tensor]]) -> Outbox:
        """Rows for waiting slots, and the requests of a round of repair.

        A shard with awaited rows missing sends no row yet. The round, with `repairs_ahead`, brings
        the missing rows, and missing rows of `soon`.
        """
        outgoing = self.shard_side.replies()
        if self._context.repairs_ahead:
            hosted, protection, view = (
                self._context.hosted,
                self._context.protection,
                self._context.view,
            )
            unawaited = {key: [rows] for key, rows in self.shard_side.unawaited().items()}
            for key, rows in soon.items():
                unawaited.setdefault(key, []).extend(rows)
            missing = {
                key: hosted[key].missing_among(torch.cat(rows).unique())
                for key, rows in unawaited.items()
            }
            self.repair = protection.begin_repair(
                self.shard_side.awaited(), missing, self._context.rebuild_rows, view
            )
            for rank, parts in self.repair.requests().items():
                outgoing.add(rank, *parts)
        return outgoing

    def receive_replies(self, came: StepReplies) -> None:
        """Take the `replies` of all ranks."""
        self._came = came.replies
        if self.repair is not None:
            self.repair.receive_requests(came.repairs)

    def rows(
        self, late: Mapping[int, Sequence[Received]], remember: bool
    ) -> dict[int, list[FoundRows]]:
        """Rows of every waiting slot, by space, in the order asked, where the rows came.

        `late` are replies received after a repair. With `remember`, a stand-in remembers the rows,
        and counts rows given in place of a shard.
        """
        came, self._came = self._came, {}  # buffers of a step, not needed any more
        return self.slot_side.collect(came, late, remember=remember, memory=self._context.memory)


def stray_row(rows: Mapping[int, Sequence[Tensor]], spaces: Sequence[RowSpace]) -> str:
    """The first of `rows[slot][space]`, int64, found outside the row space, in words; or ""."""
    for slot, of_slot in rows.items():
        for number, (wanted, space) in enumerate(zip(of_slot, spaces, strict=True)):
            if not wanted.numel():
                continue
            lowest, highest = map(int, wanted.aminmax())
            if lowest < 0 or highest >= space.rows:
                row = lowest if lowest < 0 else highest
                table, offset = (
                    (space.tables[0], 0) if row < 0 else (space.tables[-1], space.offsets[-1])
                )
                return (
                    f"slot {slot}: id {row - offset} is not in table {table.name}, "
                    f"whose ids are 0 to {table.rows - 1} "
                    f"(row {row} of row space {number}, which has rows 0 to {space.rows - 1})"
                )
    return ""

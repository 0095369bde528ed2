"""One lookup of rows, by itself or with the messages of the step before."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ecrm.placement.stripes import RowLayout
from ecrm.placement.tables import RowSpace
from ecrm.placement.view import View
from ecrm.protection.base import Protection, RepairRound
from ecrm.requests.routing import (
    MARK,
    RowMemory,
    ShardRequests,
    SlotRequests,
    StepReplies,
    asked_of,
    soon_requests,
)
from ecrm.storage.hosted import HostedShard, ShardSpace
from ecrm.transport.message import Part, Received


@dataclass(frozen=True)
class LookupContext:
    """What a lookup finds on this rank.

    `widths[space]` are the floats of a row of each row space. `hosted` are this rank's shards;
    `rebuild_rows` is how many rows a step rebuilds in the background. Values of slots lie in
    `memory`.
    """

    view: View
    layouts: Sequence[RowLayout]
    widths: Sequence[int]
    hosted: Mapping[ShardSpace, HostedShard]
    protection: Protection
    rebuild_rows: int
    memory: RowMemory = torch.empty

    @property
    def repairs_ahead(self) -> bool:
        """Whether a round of repair can be begun with a lookup; the same on all ranks."""
        return bool(self.view.rebuilding) and self.protection.repairs_ahead


class Lookup:
    """The slots' and the shards' side of one lookup on this rank.

    `repair` is the round of repair that goes with it, or None; `repair_goes_with_results` says that
    its answers are sent with the step's results. Every live rank calls `requests`,
    `receive_requests`, `replies` and `receive_replies` in that order, and exchanges what the first
    and the third return. The slots' `rows` may then be collected, once.
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
        self.shard_side = ShardRequests({}, {}, frozenset(), context.hosted)
        self.repair: RepairRound | None = None
        self.repair_goes_with_results = False
        self._came: dict[int, list[Received]] = {}

    @classmethod
    def of(
        cls,
        context: LookupContext,
        rows: Mapping[int, Sequence[Tensor]],
        soon: Mapping[int, Sequence[Tensor]] | None = None,
        computed: Collection[int] = (),
        marks: Mapping[int, int] = MappingProxyType({}),
    ) -> Lookup:
        """One that asks for `rows[slot][space]`; `soon` is what the next one will ask for.

        `marks` are digests of the slots' batches, for those who are asked.
        """
        stand_in = context.protection.stand_in
        slot_side = SlotRequests.of(
            rows, context.layouts, context.widths, context.view, stand_in, computed
        )
        return cls(context, slot_side, soon, marks)

    def again(self, context: LookupContext, told: Mapping[int, Sequence[Received]]) -> Lookup:
        """The same lookup for slots that have computed, after shards were lost.

        `told[rank]` is what its slots ask of the lost shards. No message is needed: `rows` may be
        collected at once.
        """
        lookup = Lookup(context, self.slot_side.again(context.view))
        lookup.shard_side = self.shard_side.again(told, context.hosted)
        if context.view.rebuilding:
            soon = {key: rows for key, rows in asked_of(told).items() if rows.numel()}
            lookup.repair = context.protection.foresee_repair(soon, context.view)
        return lookup

    def requests(self) -> dict[int, list[Part]]:
        """What this rank's slots ask of shards, and will soon ask of those being rebuilt."""
        outgoing = self.slot_side.requests()
        for parts in outgoing.values():
            for slot, digest in self._marks.items():
                parts.extend(((MARK, slot, digest), torch.empty(0)))
        for rank, tensors in (
            soon_requests(self._soon, self._context.layouts, self._context.view).items()
            if self._soon is not None
            else ()
        ):
            outgoing.setdefault(rank, []).extend(tensors)
        return outgoing

    def receive_requests(self, requests: Mapping[int, Sequence[Received]]) -> None:
        """What slots ask of this rank's shards."""
        self.shard_side = ShardRequests.of(requests, self._context.hosted)

    def replies(self, soon: Mapping[ShardSpace, Sequence[Tensor]]) -> dict[int, list[Part]]:
        """Rows for slots that wait, and what a round of repair asks for.

        A shard of which asked rows are missing sends none yet. The round, where it can begin here,
        brings the missing rows and those that slots will ask for `soon`.
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
                outgoing.setdefault(rank, []).extend(parts)
        return outgoing

    def receive_replies(self, came: StepReplies) -> None:
        """Others' `replies`."""
        self._came = came.replies
        if self.repair is not None:
            self.repair.receive_requests(came.repairs)

    def rows(
        self, late: Mapping[int, Sequence[Received]], remember: bool
    ) -> dict[int, list[Tensor]]:
        """Rows of each slot that waits, by space, in the order asked, float32 [U, dim].

        `late` are replies that came after a repair. A stand-in is to `remember` the rows, and to
        count those that it gives.
        """
        came, self._came = self._came, {}  # buffers of a step, which nobody needs any more
        return self.slot_side.collect(came, late, remember=remember, memory=self._context.memory)


def stray_row(rows: Mapping[int, Sequence[Tensor]], spaces: Sequence[RowSpace]) -> str:
    """Which of `rows[slot][space]`, int64, is not in its row space, in words; or nothing."""
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

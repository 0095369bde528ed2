"""Reed-Solomon parity of every row and its optimizer state, kept current by every sparse update.

Lost units are recovered only from shards without missing rows, and only at a commit, when rows and
parity are of one step. The engine commits every step during rebuilding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ecrm.device.copies import on_device
from ecrm.kernels.decode import decode
from ecrm.kernels.unit_order import split_by_unit
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View
from ecrm.protection.base import Protection, RepairReport, VerifyReport
from ecrm.protection.coding.code import ReedSolomon
from ecrm.protection.context import ProtectionContext
from ecrm.protection.kinds import KINDS
from ecrm.protection.parity import ParityRows
from ecrm.protection.rebuild import HANDED, Rebuild
from ecrm.protection.routing import ShardRequests
from ecrm.protection.scrub import Scrub, ScrubReport
from ecrm.storage.hosted import ShardSpace
from ecrm.storage.undo import Deltas
from ecrm.transport.message import Part, Picked, gathered, in_groups
from ecrm.transport.piggyback import Rounds

VERIFY_BYTES = 1 << 26
"""Bytes of records verified at a time per rank: bounds the memory of a check."""


class ErasureProtection(Protection):
    """(k, m) Reed-Solomon stripes over the shards: any m lost ranks are recovered bit for bit."""

    kind = KINDS["erasure"]
    redundancy = "parity rows"
    foresees_repair = True
    rows_kind = ParityRows
    rebuild_kind = Rebuild

    def __init__(self, shards: int, k: int, m: int) -> None:
        self.shape = StripeShape(shards, k, m)
        self.code = ReedSolomon(k, m)
        self._coefficients = torch.tensor(self.code.coefficients)
        self.parity: dict[ShardSpace, ParityRows] = {}
        self._scrub: Scrub | None = None
        # the round whose decoded rows go with the next redundancy, if any
        self._due: list[Rebuild] = []

    @property
    def repairs_ahead(self) -> bool:
        return True

    @property
    def in_words(self) -> str:
        return f"erasure k={self.shape.k} m={self.shape.m}"

    @property
    def redundancy_bytes(self) -> int:
        return sum(parity.records.nbytes for parity in self.parity.values())

    @property
    def log_bytes(self) -> int:
        return sum(parity.log_bytes for parity in self.parity.values())

    @property
    def memory(self) -> list[Tensor]:
        return [parity.records for parity in self.parity.values()]

    def with_shape(self, shape: StripeShape) -> ErasureProtection:
        return ErasureProtection(shape.shards, shape.k, shape.m)

    def start(self, context: ProtectionContext, view: View) -> None:
        """Start with zero parity, the parity of zero records: nothing needs encoding."""
        self._context = context
        self.adopt(view, missing=False)

    def adopt(self, view: View, missing: bool = True) -> None:
        if self._scrub is not None and view.rebuilding:
            self._scrub.rebuilding(view.rebuilding)
        self._due = []
        mine = view.shards_of(self._context.transport.rank)
        for key in [key for key in self.parity if key[0] not in mine]:
            del self.parity[key]
        for shard in mine:
            for space, layout in enumerate(self._context.layouts):
                if (shard, space) not in self.parity:
                    self.parity[shard, space] = self.rows_kind(
                        layout.parity_rows_per_shard,
                        self._context.record_bytes[space],
                        missing,
                        self._context.allocate,
                    )

    def protect(
        self, deltas: dict[ShardSpace, Deltas], view: View, ahead: ShardRequests | None = None
    ) -> Rounds:
        outgoing: dict[int, list[Part]] = {}
        for (shard, space), some in sorted(deltas.items()):
            for rows, delta in some:
                self._route(shard, space, rows, delta, view, outgoing)
                if self._scrub is not None:
                    self._scrub.used(shard, space, rows)
        due, self._due = self._due, []
        for done in due:
            for rank, parts in done.handed_on().items():
                outgoing.setdefault(rank, []).extend(parts)
        received = yield outgoing
        # decoded parity is of the commit before: the deltas of this step must find it in place
        for done in due:
            done.take(received)
        for tensors in received.values():
            for head, rows, delta in in_groups(tensors, 3):
                holder, space, coefficient = head
                if holder != HANDED:
                    self.parity[holder, space].apply(
                        rows, coefficient, gathered(delta).view(rows.numel(), -1)
                    )

    def _route(
        self,
        shard: int,
        space: int,
        rows: Tensor,
        delta: Tensor,
        view: View,
        outgoing: dict[int, list[Part]],
    ) -> None:
        """Add a shard's deltas to `outgoing`, once for every changed parity row.

        Deltas are grouped by parity and holder. Deltas in the order of `unique_by_unit`, or of one
        unit, are sent without reordering.
        """
        layout, counts, periods, in_order = (
            self._context.layouts[space],
            *split_by_unit(rows, self.shape.k),
        )
        of_unit: Iterable[tuple[Tensor, Part]]
        if in_order:
            of_unit = zip(periods.split(counts), delta.split(counts), strict=True)
        else:
            places = (rows % self.shape.k).argsort(stable=True).split(counts)
            of_unit = ((periods[place], Picked(delta, place)) for place in places)
        for unit, (unit_periods, unit_delta) in enumerate(of_unit):
            if not counts[unit]:
                continue
            residue = self.shape.residue_of_unit(shard, unit)
            for t in range(self.shape.m):
                holder = self.shape.shard_of_unit(residue, self.shape.k + t)
                head = (holder, space, int(self.code.coefficients[t, unit]))
                outgoing.setdefault(view.shards[holder], []).extend(
                    (head, layout.local_parity(unit_periods, t), unit_delta)
                )

    def committed(self) -> None:
        self._due = []
        for parity in self.parity.values():
            parity.committed()

    def undo(self) -> None:
        self._due = []
        for parity in self.parity.values():
            parity.undo()

    def repair(self, wanted: dict[ShardSpace, Tensor], budget: int, view: View) -> RepairReport:
        # no redundancy need follow: rows on their way are decoded anew, on the new hosts
        self._due = []
        exchange, begun = (
            self._context.transport.exchange,
            self._rebuild(view, wanted, {}, budget),
        )
        begun.receive_requests(exchange(begun.requests()))
        answers = begun.answers()
        for rank, tensors in begun.rest().items():
            answers.setdefault(rank, []).extend(tensors)
        begun.finish(exchange(answers))
        return begun.report

    def begin_repair(
        self,
        wanted: dict[ShardSpace, Tensor],
        soon: dict[ShardSpace, Tensor],
        budget: int,
        view: View,
    ) -> Rebuild:
        return self._rebuild(view, wanted, soon, budget, self._due, self._finished)

    def _finished(self, done: Rebuild) -> None:
        self._due = [done]

    def _rebuild(self, view: View, *how: Any) -> Rebuild:
        return self.rebuild_kind(self.shape, self.code, self._context, self.parity, view, *how)

    def foresee_repair(self, soon: dict[ShardSpace, Tensor], view: View) -> Rebuild:
        mine = {key: rows for key, rows in soon.items() if key in self.parity}
        begun = self.begin_repair({}, mine, 0, view)
        begun.foresee(soon)
        return begun

    def make_scrub(self, rows_per_step: int, report: ScrubReport | None = None) -> Scrub | None:
        if rows_per_step:
            self._scrub = Scrub(
                self.shape, self.code, self._context, self.parity, rows_per_step, report
            )
        return self._scrub

    def verify(self, view: View) -> VerifyReport:
        """Send every data row to the holders of its parity, encode again and compare."""
        stripes = mismatches = 0
        for space, layout in enumerate(self._context.layouts):
            step = max(
                1,
                VERIFY_BYTES
                // (self._context.record_bytes[space] * self.shape.k * max(1, self.shape.m)),
            )
            for first in range(0, layout.periods, step):
                periods = torch.arange(first, min(first + step, layout.periods))
                checked, wrong = self._verify_periods(space, periods, view)
                stripes, mismatches = stripes + checked, mismatches + wrong
        return VerifyReport(stripes, mismatches)

    def _verify_periods(self, space: int, periods: Tensor, view: View) -> tuple[int, int]:
        """Collective: check the rank's parity rows in periods of stripes, int64 [P].

        Returns the numbers of rows checked and of wrong rows.
        """
        k, m = self.shape.k, self.shape.m
        outgoing: dict[int, list[Part]] = {}
        for (shard, this), hosted in sorted(self._context.hosted.items()):
            if this != space:
                continue
            for unit in range(k):
                residue = self.shape.residue_of_unit(shard, unit)
                records = hosted.store.read(periods * k + unit)
                for t in range(m):
                    holder = self.shape.shard_of_unit(residue, k + t)
                    outgoing.setdefault(view.shards[holder], []).extend(
                        ((residue, unit, t), records)
                    )
        units: dict[tuple[int, int, int], Tensor] = {}
        for tensors in self._context.transport.exchange(outgoing).values():
            for head, records in in_groups(tensors, 2):
                units[head] = records.view(periods.numel(), -1)
        checked = wrong = 0
        for (shard, this), parity in self.parity.items():
            for t in range(m) if this == space else ():
                residue = self.shape.residue_of_unit(shard, k + t)
                data = torch.stack([units[residue, unit, t] for unit in range(k)])
                held = parity.read(periods * m + t)
                expected = decode(on_device(held.device, data), self._coefficients[t : t + 1])[0]
                checked += periods.numel()
                wrong += int((expected != held).any(dim=1).sum())
        return checked, wrong

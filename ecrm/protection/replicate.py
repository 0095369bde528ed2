"""Ultralight replication: `copies` of every row and its state, including copies of trainers.

After "Lossless Failure Recovery of Parameter Servers with Ultralight Replication" (FreeLauncher).
With the last results of a step, trainers are sent the rows of the next step. So a trainer asking
for a row holds the newest values until the next update of the row. At a commit the host of a shard
counts, for each changed row, the trainers in other failure domains asking for the row. The host
sends up to `copies` - 1 trainers the rest of the record, a few bytes of optimizer state, to make
their copies whole. Only rows asked for by too few trainers are sent to backups. Hot rows, nearly
all rows changed by a step, are hardly ever sent twice.

Backups lie on the links of chain replication: a stripe has one data unit, the backup of shard s is
on shards s - 1, s - 2, ... A backup passed over is told to mark the row stale. At least one trainer
then holds the row, and the next step updates the row and decides anew at its commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ecrm.base.errors import Unrecoverable
from ecrm.base.wording import counted, named
from ecrm.kernels.records import scatter_records
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View
from ecrm.protection.backup import BackupRows
from ecrm.protection.base import RepairReport
from ecrm.protection.chain import ChainProtection
from ecrm.protection.copy_rebuild import CopyRebuild
from ecrm.protection.kinds import KINDS
from ecrm.protection.routing import ShardRequests, SlotRequests
from ecrm.protection.scrub import Scrub, ScrubReport
from ecrm.storage.hosted import ShardSpace
from ecrm.storage.undo import Deltas
from ecrm.transport.message import Part, Received, in_groups, matrix
from ecrm.transport.piggyback import Rounds

BACKUP, TAIL, STALE = range(3)


@dataclass(frozen=True)
class Held:
    """Copies of rows of one shard and space on a trainer, as of a commit.

    Local `rows`, int64 [R], and `records`, uint8 [R, B].
    """

    rows: Tensor
    records: Tensor


class ReplicateProtection(ChainProtection):
    """`copies` of every row at every commit: any `copies` - 1 ranks may be lost.

    `held` are the rank's copies as a trainer, as of the last commit.
    """

    kind = KINDS["replicate"]
    rows_kind = BackupRows
    rebuild_kind = CopyRebuild
    foresees_repair = False  # trainers' copies come first
    rebuilding_may_move = False  # the new host may have the last copies, sent by trainers
    rebuilding_makes_whole = False  # the next step replaces the copies of dead trainers

    def __init__(self, shards: int, copies: int) -> None:
        super().__init__(shards, copies)
        self.held: dict[ShardSpace, list[Held]] = {}
        self._next: dict[ShardSpace, list[Held]] | None = None
        self._tails: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self._delivered = False

    @property
    def in_words(self) -> str:
        return f"ultralight replication, {self.shape.m + 1} copies"

    @property
    def redundancy_bytes(self) -> int:
        copies = [copy for copies in self.held.values() for copy in copies]
        return super().redundancy_bytes + sum(
            copy.rows.nbytes + copy.records.nbytes for copy in copies
        )

    @property
    def newest_held(self) -> dict[ShardSpace, list[Held]]:
        """The rank's copies as a trainer, as of a commit in the making, or the last commit."""
        return self.held if self._next is None else self._next

    @property
    def repairs_ahead(self) -> bool:
        """False until a first round, begun with the trainers' copies, is committed."""
        return self._delivered

    def failures_left(self, view: View, shape: StripeShape, gone: int) -> int:
        return min(super().failures_left(view, shape, gone), max(shape.m - gone, 0))

    def check_losses(self, view: View, dead: Sequence[int], gone: int, step: int) -> None:
        """Raise Unrecoverable if deaths since the commit may have taken all copies of a row."""
        lost = sorted(
            {*view.rebuilding, *(shard for shard, host in enumerate(view.shards) if host in dead)}
        )
        # copies on trainers are outside of the stripes: count all domains lost since the commit
        if lost and gone > self.shape.m:
            raise Unrecoverable(
                f"{named('rank', dead)} died: more was lost than {self.in_words} can bring back: "
                f"{counted(gone, 'failure domain')} since step {step} ({named('shard', lost)} lost)"
            )

    def with_shape(self, shape: StripeShape) -> ReplicateProtection:
        return ReplicateProtection(shape.shards, shape.m + 1)

    def _backup(self, shard: int, space: int) -> BackupRows:
        return cast(BackupRows, self.parity[shard, space])  # made by `rows_kind`

    def adopt(self, view: View, missing: bool = True) -> None:
        super().adopt(view, missing)
        self._delivered = not view.rebuilding

    def protect(
        self, deltas: dict[ShardSpace, Deltas], view: View, ahead: ShardRequests | None = None
    ) -> Rounds:
        assert ahead is None or all(len(parts) == 1 for parts in deltas.values()), (
            "copies with trainers are noted once for each shard"
        )
        outgoing: dict[int, list[Part]] = {}
        for shard, space, rows in (
            (*key, rows) for key in sorted(deltas) for rows, _ in deltas[key]
        ):
            # an unchanged shard is protected as it is
            if rows.numel():
                # without `ahead` no trainer is sure to get the newest rows: backups hold all copies
                askers = {} if ahead is None else ahead.askers(shard, space, rows)
                self._spread(shard, space, rows, askers, view, outgoing)
        self._tails, self._next = {}, {}
        for tensors in (yield outgoing).values():
            for head, where, records in in_groups(tensors, 3):
                kind, shard, space, slot = head
                # the row itself comes with the replies to the slot: `retain` joins row and tail
                if kind == TAIL:
                    self._tails[slot, shard, space] = where, records.view(where.numel(), -1)
                elif kind == STALE:
                    self._backup(shard, space).passed_over(where)
                else:
                    self._backup(shard, space).put(where, records.view(where.numel(), -1))

    def _spread(
        self,
        shard: int,
        space: int,
        rows: Tensor,
        askers: Mapping[int, tuple[int, Tensor]],
        view: View,
        outgoing: dict[int, list[Part]],
    ) -> None:
        """Add to `outgoing` the messages to make m other failure domains hold each row.

        Trainers asking for the row get the tail, backups in further domains the record. With fewer
        than m other domains, all backups hold the row.

        `askers[slot]` is (rank of the slot, place of each row in the slot's request or -1, int64
        [R]).
        """
        m, layout, store = (
            self.shape.m,
            self._context.layouts[space],
            self._context.hosted[shard, space].store,
        )
        copies = torch.zeros(rows.numel(), dtype=torch.int64)
        own = view.domains[view.shards[shard]]
        links = [self._holder(shard, link) for link in reversed(range(m))]
        held_by = {
            view.domains[view.shards[link]]: torch.zeros(rows.numel(), dtype=torch.bool)
            for link in links
        }
        taken: dict[int, Tensor] = {}
        for slot, (rank, places) in sorted(askers.items()):
            domain = view.domains[rank]
            # a copy in the host's own domain would be lost together with the row
            if domain == own:
                continue
            already = taken.setdefault(domain, torch.zeros(rows.numel(), dtype=torch.bool))
            # more than m copies, or two in one domain, would cover no further loss
            chosen = (places >= 0) & (copies < m) & ~already
            here = chosen.nonzero().squeeze(1)
            # an empty tail would make an empty copy on the trainer
            if not here.numel():
                continue
            copies[here] += 1
            already[here] = True
            # a backup in the trainer's domain would be lost together with the trainer
            if domain in held_by:
                held_by[domain][here] = True
            outgoing.setdefault(rank, []).extend(
                ((TAIL, shard, space, slot), places[here], store.read_tail(rows[here]))
            )
        link_of = {holder: link for link, holder in zip(reversed(range(m)), links, strict=True)}
        sent = {holder: torch.zeros(rows.numel(), dtype=torch.bool) for holder in links}
        for holder in links:
            domain = view.domains[view.shards[holder]]
            # a backup in the host's own domain would be lost together with the row
            if domain != own:
                sent[holder] = (copies < m) & ~held_by[domain]
                held_by[domain] |= sent[holder]
                copies += sent[holder]
        for holder in links:
            # too few domains for m copies: ranks of one domain may still die one by one
            sent[holder] |= copies < m
            local = layout.local_parity(rows, link_of[holder])
            # a backup passed over must not serve its old record in a rebuild
            for kind, here in ((BACKUP, sent[holder]), (STALE, ~sent[holder])):
                here = here.nonzero().squeeze(1)
                # often all rows are of one kind: the empty message is saved
                if here.numel():
                    # a stale mark needs no record, but receivers read groups of three parts
                    content = store.read(rows[here] if kind == BACKUP else rows[:0])
                    outgoing.setdefault(view.shards[holder], []).extend(
                        ((kind, holder, space, 0), local[here], content)
                    )

    def retain(self, asked: SlotRequests, replies: Mapping[int, Sequence[Received]]) -> None:
        """Make copies of the next step's rows, sent to the rank's slots.

        The tails received before complete the rows.
        """
        assert self._next is not None, "protect() comes first"
        found = asked.found(replies) if self._tails else {}
        for (slot, shard, space), (places, tails) in self._tails.items():
            local = asked.local(slot, shard, space)
            values, picked = matrix(found[slot, shard, space], local.numel())
            records = torch.empty(places.numel(), values.shape[1] + tails.shape[1] // 4)
            chosen = places if picked is None else picked[places]
            scatter_records(
                records[:, : values.shape[1]],
                (),
                torch.arange(places.numel()),
                values.view(torch.uint8),
                picked=chosen,
            )
            records.view(torch.uint8)[:, 4 * values.shape[1] :] = tails
            begun = tails[:, -1] != 0  # false for a row passed over and never updated
            if not begun.all():
                records[~begun] = 0.0
            self._next.setdefault((shard, space), []).append(
                Held(local[places], records.view(torch.uint8))
            )
        self._tails = {}

    def committed(self) -> None:
        super().committed()
        if self._next is not None:
            self.held, self._next = self._next, None
        self._delivered = True

    def undo(self) -> None:
        super().undo()
        self._next, self._tails, self._delivered = None, {}, False

    def repair(self, wanted: dict[ShardSpace, Tensor], budget: int, view: View) -> RepairReport:
        """First restore lost rows from trainers' copies, as new as any backup; then use backups."""
        # once only: from the commit of this round on, the new host has every copied row
        if not self._delivered:
            outgoing: dict[int, list[Part]] = {}
            for (shard, space), copies in sorted(self.held.items()):
                for copy in copies if shard in view.rebuilding else ():
                    outgoing.setdefault(view.shards[shard], []).extend(
                        ((shard, space), copy.rows, copy.records)
                    )
            for tensors in self._context.transport.exchange(outgoing).values():
                for head, rows, records in in_groups(tensors, 3):
                    hosted = self._context.hosted[head]
                    lost = hosted.missing_among(rows)
                    here = torch.isin(rows, lost)
                    hosted.restore(rows[here], records.view(rows.numel(), -1)[here])
            wanted = {
                key: self._context.hosted[key].missing_among(rows) for key, rows in wanted.items()
            }
        return super().repair(wanted, budget, view)

    def make_scrub(self, rows_per_step: int, report: ScrubReport | None = None) -> Scrub | None:
        """`None`: a backup may be stale."""
        return None

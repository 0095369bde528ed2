"""The data of a rank, and the changes by a commit, an undo, a view or a layout."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ecrm.engine.dense import DenseReplica
from ecrm.engine.engine_events import (
    corruption_event,
    rebuilt_event,
    reshaped_event,
    restored_event,
    view_event,
)
from ecrm.engine.failures import FailureLog
from ecrm.engine.hooks import EnginePolicy, Hooks
from ecrm.engine.lookup import LookupContext
from ecrm.engine.memory_count import Memory, gather_memory
from ecrm.engine.reshape import Reshape
from ecrm.engine.rollback import Rollback
from ecrm.engine.shard_stores import ShardStores
from ecrm.engine.step_log import StepLog
from ecrm.placement.assignment import plan_reshape
from ecrm.placement.stripes import StripeShape
from ecrm.placement.tables import RowSpace
from ecrm.placement.view import View, mark_whole
from ecrm.protection.base import Protection, RepairReport
from ecrm.protection.context import ProtectionContext
from ecrm.protection.rebuild_pace import RebuildPace
from ecrm.protection.routing import RowMemory
from ecrm.protection.wire_dtype import Wire
from ecrm.storage.hosted import HostedShard, ShardSpace
from ecrm.transport.base import Transport


class EngineState:
    """A rank's shards, redundancy and dense replica, with the logs to undo a step.

    - `step`: the step to run next. `committed`: number of steps not to be taken back.
    - `view`: the present map of roles; `first_view`: at the undisturbed start.
    - `live_at_commit`: the live ranks at the last commit of a step, at the end of a rebuild with
      all redundancy back, or at a new layout.
    - `dense`: this rank's dense replica or `None`. `log`: notes of slots, with a replica.
    - `failures`: the record of failures survived.
    - `admits_from`: the step from which on ranks may join, infinity for none; alike on all ranks.
    - `rebuild_left`: rows still missing, by rebuilding shard. `pace`: this rank's choice of rows to
      rebuild beside a step.

    Values for slots lie in memory from `row_memory`. `wire` is the form of rows and gradients on
    the way, rounded to `wire_dtype`.
    """

    def __init__(
        self,
        transport: Transport,
        stores: ShardStores,
        view: View,
        protection: Protection,
        make_dense: Callable[[], DenseReplica],
        policy: EnginePolicy,
        hooks: Hooks | None,
        clock: Callable[[], float] = time.monotonic,
        row_memory: RowMemory = torch.empty,
        wire_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.row_memory, self.wire_dtype = row_memory, wire_dtype
        self.transport, self.stores, self.view, self.protection = (
            transport,
            stores,
            view,
            protection,
        )
        self._make_dense, self.policy, self.hooks, self.clock = (
            make_dense,
            policy,
            hooks or Hooks(),
            clock,
        )
        self.first_view, self._first_shape = view, protection.shape
        self.layouts = stores.layouts(protection.shape)
        self.hosted: dict[ShardSpace, HostedShard] = {}
        self.step = self.committed = self.commits = 0
        self.admits_from = 0.0
        self.failures = FailureLog()
        self.live_at_commit = view.live
        self.rebuild_left: dict[int, int] = {}
        self.repaired: RepairReport | None = None  # since the last commit
        self.reshape: Reshape | None = None  # the layout to adopt at the next commit
        # a run that begins without ranks of the run before may have stripe members on one rank
        self.reshape_considered: int = -1 if view.epoch else 0
        # whether the last commit corrected rows after the read for the next step
        self.put_right = False
        self.peak_undo_bytes = 0
        self.dense: DenseReplica | None = make_dense() if self.rank in view.dense else None
        self.log = StepLog()
        self.context = ProtectionContext(
            transport,
            self.layouts,
            stores.record_bytes,
            self.hosted,
            stores.initial,
            allocate=stores.allocate,
        )
        self.host_shards(missing=False)
        protection.start(self.context, view)
        self.scrub = protection.make_scrub(policy.scrub_rows_per_step)
        self.pace = RebuildPace(
            policy.rebuild_share, policy.rebuild_rows_per_step, max(stores.record_bytes, default=1)
        )

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots of this rank."""
        return self.view.slots_of(self.rank)

    @property
    def spaces(self) -> tuple[RowSpace, ...]:
        """The row spaces: tables of the same width and optimizer, end to end."""
        return self.stores.spaces

    @property
    def record_bytes(self) -> tuple[int, ...]:
        """Size of a record, by row space."""
        return self.stores.record_bytes

    @property
    def repairs_ahead(self) -> bool:
        """Whether a round of repair can be begun with a lookup; the same on all ranks."""
        return bool(self.view.rebuilding) and self.protection.repairs_ahead

    @property
    def failures_left(self) -> int:
        """Number of further failure domains that may be lost at once without loss of data."""
        return self.protection.failures_left(
            self.view, self.protection.shape, self.lost_since_commit(self.view.live)
        )

    @property
    def asks_for_newcomers(self) -> bool:
        """Whether this rank knows of ranks that wait to join, and that can join at this step."""
        kind = self.protection.kind
        can = kind.keeps_deltas and kind.exact and self.step >= self.admits_from
        return can and self.transport.newcomers_wait

    def lost_since_commit(self, live: Collection[int]) -> int:
        """Number of failure domains with a rank of `live_at_commit` not in `live`."""
        return len({self.view.domains[rank] for rank in self.live_at_commit if rank not in live})

    @property
    def failures_left_when_rebuilt(self) -> int:
        """`failures_left` after the rebuild, and after a reshape if one is due."""
        whole = mark_whole(self.view, self.view.rebuilding)
        plan = self.reshape_plan(whole) if self.policy.reshape else None
        shape, view = plan or (self.protection.shape, whole)
        return self.protection.failures_left(view, shape, 0)

    def reshape_plan(self, view: View) -> tuple[StripeShape, View] | None:
        """A better layout for `view`, as in `plan_reshape`."""
        return plan_reshape(view, self.protection.shape, self.first_view, self._first_shape)

    @property
    def rebuild_fraction(self) -> float:
        """Share of rebuilding shards' rows, redundancy included, already back; 1 for no rebuild."""
        rows = sum(
            layout.data_rows_per_shard + layout.parity_rows_per_shard for layout in self.layouts
        )
        total = rows * len(self.view.rebuilding)
        left = sum(self.rebuild_left.get(shard, rows) for shard in self.view.rebuilding)
        return 1.0 - left / total if total else 1.0

    @property
    def tensors(self) -> list[Tensor]:
        """The live tensors of all rows and redundancy held on this rank."""
        return [part for hosted in self.hosted.values() for part in hosted.store.memory] + list(
            self.protection.memory
        )

    def lookup_context(self, rebuild_rows: int) -> LookupContext:
        """The data of this rank for a lookup; `rebuild_rows`: background rows per shard."""
        widths = [space.dim for space in self.spaces]
        return LookupContext(
            self.view,
            self.layouts,
            widths,
            self.hosted,
            self.protection,
            rebuild_rows,
            self.row_memory,
            self._pools,
            Wire(self.wire_dtype, self._at_hand, self.protection.kind.copies_at_slots),
        )

    @property
    def may_sum_bags(self) -> bool:
        """Whether shards may sum bags.

        For whole tables, and unless copies of rows at slots are part of the protection.
        """
        protection = self.protection
        if protection.stand_in is not None or protection.kind.copies_at_slots:
            return False
        return any(layout.places is not None for layout in self.layouts)

    def _pools(self, rank: int) -> bool:
        """Whether bags may be asked of a rank's shards, whose memory is not at hand.

        Rows in memory at hand cost no copy.
        """
        return self.may_sum_bags and not self._at_hand(rank)

    def _at_hand(self, rank: int) -> bool:
        """Whether this rank and another one read each other's memory."""
        memory = self.transport.shared_memory
        return rank == self.rank or (memory is not None and rank in memory.readers)

    def memory(self) -> Memory:
        """Collective: the memory of every rank. Raises PeerFailure as transport calls do."""
        held = (
            sum(hosted.store.memory_bytes for hosted in self.hosted.values()),
            self.protection.redundancy_bytes,
            self.peak_undo_bytes,
            0 if self.dense is None else self.dense.memory_bytes,
        )
        return gather_memory(self.transport, len(self.view.shards_of(self.rank)), held)

    def accept_commit(self) -> None:
        """Commit all steps before `step`, not to be taken back any more."""
        self.commits += 1
        if self.step > self.committed:
            self.live_at_commit = self.view.live
        self.committed = self.context.committed = self.step
        self.failures.committed(self.step)
        adopted, self.reshape = self.reshape, None
        if adopted is not None:
            self._adopt_reshaped(adopted)
        for hosted in self.hosted.values():
            hosted.committed()
        self.protection.committed()
        if self.dense is not None:
            self.dense.commit()
        found = [] if self.scrub is None else self.scrub.committed()
        self.put_right = bool(found)
        for finding in found:
            self.hooks.event(
                corruption_event(finding, self.step, self.spaces, self.protection.shape)
            )
        self._count_whole()

    def _count_whole(self) -> None:
        """End the rebuild of shards without missing rows at the last round of repair."""
        report, self.repaired = self.repaired, None
        if report is None:
            return
        whole = [shard for shard in self.view.rebuilding if report.left[shard] == 0]
        if not whole:
            return
        self.view = mark_whole(self.view, whole)
        if not self.view.rebuilding and self.protection.rebuilding_makes_whole:
            self.live_at_commit = self.view.live
        for failure in self.failures.shards_whole(
            whole, self.view.rebuilding, report.on_demand, self.clock()
        ):
            self.hooks.event(rebuilt_event(failure, self.failures_left))
        if accounts := self.protection.accounts(whole):
            self.failures.restored += accounts
            self.hooks.event(restored_event(self.step, self.view, accounts))

    def _adopt_reshaped(self, adopted: Reshape) -> None:
        """Switch to the new layout, from this commit on."""
        self.adopt(adopted)
        self.reshape_considered = self.view.epoch
        self.hooks.event(
            reshaped_event(
                self.step,
                adopted.shape,
                self.clock() - adopted.began,
                adopted.moved_bytes,
                self.failures_left,
            )
        )
        self.hooks.event(view_event(self.step, self.view))

    def adopt(self, laid_out: Reshape | Rollback) -> None:
        """Take shards, redundancy and view of a new layout, at this commit."""
        self.view, self.layouts, self.hosted = laid_out.view, laid_out.layouts, laid_out.hosted
        self.protection, self.context = laid_out.protection, laid_out.context
        self.context.committed = self.committed
        self.live_at_commit = self.view.live
        if self.scrub is not None:
            self.scrub = self.protection.make_scrub(
                self.policy.scrub_rows_per_step, self.scrub.report
            )

    def drop_rows(self) -> None:
        """Drop all rows and redundancy, to make room before everything is loaded anew."""
        self.hosted.clear()
        self.protection = self.protection.with_shape(self.protection.shape)

    def take_loaded(self, loaded: Rollback) -> None:
        """Take the state loaded from the durable tier, after `drop_rows`."""
        self.step = self.committed = loaded.step
        self.commits = loaded.commits
        self.adopt(loaded)
        self.reshape, self.repaired, self.rebuild_left = None, None, {}
        self.reshape_considered, self.put_right = -1, False
        self.dense, self.log = None, StepLog()
        if self.rank in self.view.dense:
            self.load_dense(loaded.dense)

    def begin_anew(self, shape: StripeShape) -> None:
        """Hold nothing, over stripes of `shape`: for a rank that joins a run under way."""
        self.hosted, self.dense, self.log = {}, None, StepLog()
        self.protection = self.protection.with_shape(shape)
        self.layouts = self.stores.layouts(shape)
        self.context = replace(self.context, layouts=self.layouts, hosted=self.hosted)
        self.view = replace(self.view, epoch=-1, live=(), shards=(), slots=(), dense=())
        self.protection.start(self.context, self.view)
        self.scrub = self.protection.make_scrub(self.policy.scrub_rows_per_step)

    def undo(self) -> None:
        """Go back to the last commit; a second call changes nothing."""
        for hosted in self.hosted.values():
            hosted.undo()
        self.protection.undo()
        if self.scrub is not None:
            self.scrub.undo()
        self.repaired, self.reshape, self.rebuild_left = None, None, {}
        self.reshape_considered = -1
        if self.dense is not None:
            self.dense.undo()
        self.log.undo(self.committed)

    def export_dense(self) -> list[Tensor]:
        """The committed dense state and the notes of committed steps, for new holders."""
        assert self.dense is not None
        return [*self.dense.export(), *self.log.export(self.committed)]

    def present_dense(self) -> list[Tensor]:
        """The present dense state and notes, as in `export_dense` after a commit."""
        assert self.dense is not None
        return [*self.dense.present(), *self.log.export(self.step)]

    def load_dense(self, state: Sequence[Tensor] | None) -> None:
        """Take an exported dense state, or the undisturbed start for `None`."""
        self.dense, self.log = self._make_dense(), StepLog()
        if state is not None:
            size = len(self.dense.export())
            self.dense.load(state[:size])
            self.log = StepLog(state[size:])  # empty in checkpoints of earlier versions

    def host_shards(self, missing: bool) -> None:
        """Hold exactly the shards of this rank in the view.

        Rows of new shards are `missing`, or have initial values.
        """
        mine = self.view.shards_of(self.rank)
        for key in [key for key in self.hosted if key[0] not in mine]:
            del self.hosted[key]
        new = [shard for shard in mine if (shard, 0) not in self.hosted]
        self.hosted.update(self.stores.host(new, self.layouts, self.protection, missing))

    def note_undo_bytes(self) -> None:
        undo_bytes = self.protection.log_bytes + sum(
            hosted.log_bytes for hosted in self.hosted.values()
        )
        self.peak_undo_bytes = max(self.peak_undo_bytes, undo_bytes)

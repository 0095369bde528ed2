"""The engine: one bulk-synchronous step over shards and slots, and the way back to the commit when ranks die.

This is the only place where transport, storage, protection and views meet. A training loop drives it:

    while engine.step < steps:
        try:
            rows = engine.lookup(requests_of(engine.step, engine.slots), apply_follows=True)
            ...                                   # forward and backward, local to the slot
            engine.apply(row_gradients, dense_contributions)
        except StepAborted:
            continue                              # engine.step and engine.slots may have changed

Every live rank calls the same methods in the same order, with empty requests where it runs no slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ecrm.engine.corruption import corruption_event
from ecrm.engine.dense import DenseReplica, SlicedSum, spread_dense
from ecrm.engine.events import failure_event, rebuilt_event, reshaped_event, restored_event, rolled_back_event
from ecrm.engine.failures import Failure, FailureLog
from ecrm.engine.hooks import EnginePolicy, Hooks, StepAborted, StopAgreed
from ecrm.engine.ledger import Ledger
from ecrm.engine.lookup import Lookup, Where
from ecrm.engine.memory import Memory, gather_memory
from ecrm.engine.reshape import Reshape
from ecrm.engine.resume import Resume
from ecrm.engine.riders import RidingTransport
from ecrm.engine.rollback import Durable, Rollback
from ecrm.engine.routing import DENSE, STOP, Results, Riders, ShardRequests
from ecrm.errors import EcrmError, Unrecoverable
from ecrm.placement.recovery import plan_recovery
from ecrm.placement.reshape import plan_reshape
from ecrm.placement.stripes import RowLayout
from ecrm.placement.tables import Table, row_spaces
from ecrm.placement.view import View, mark_whole
from ecrm.protection.base import Protection, ProtectionContext, RepairReport, ShardSpace, VerifyReport
from ecrm.storage import StoreFactory
from ecrm.storage.base import Allocate, Store, lazy_zeros
from ecrm.storage.hosted import HostedShard
from ecrm.storage.initial import initial_rows
from ecrm.transport.base import PeerFailure, Transport
from ecrm.transport.message import Part


class Engine:
    """One rank's part in the run.

    `step` is the step to run next, `committed` the number of steps that cannot be taken back, `view`
    the current map of roles, `dense` this rank's dense replica or None, `failures` what was survived,
    `live_at_commit` the ranks of the view at the last commit of a step, `stopping` whether all are to stop at this commit since one of them asks for it,
    `doubts`, for others to set, whether this rank doubts its input, `doubted` whether one did in the last recovery,
    `confirmed` whether all rows that the last `lookup` returned here had come with the `apply` before it: if the step then begins again, it
    is since an agreement has confirmed that nobody died while they came.
    """

    def __init__(
        self,
        transport: Transport,
        tables: Sequence[Table],
        view: View,
        protection: Protection,
        make_store: StoreFactory,
        make_dense: Callable[[], DenseReplica],
        seed: int,
        policy: EnginePolicy,
        hooks: Hooks | None = None,
        clock: Callable[[], float] = time.monotonic,
        durable: Durable | None = None,
        allocate: Allocate = lazy_zeros,
    ) -> None:
        self._durable, self._allocate = durable, allocate
        self.rollbacks = 0
        self._state_lost = False  # from the moment a rollback begins until all agree that it is through
        self.transport = self._riding = RidingTransport(transport)
        self.view, self.protection = view, protection
        self._put_right = False  # whether the last commit changed rows that the next step's values were read from
        self._ahead: Lookup | None = None
        self._lookup: Lookup | None = None  # of the step that is under way
        self._recovered = False  # and nothing was looked up since
        self._resume: Resume | None = None  # once all slots have computed the step that is under way
        self._resumed: Lookup | None = None  # what the next lookup needs no message for
        self.confirmed = False
        self.tables, self.spaces = tuple(tables), row_spaces(tables)
        self.layouts = tuple(RowLayout(protection.shape, space.rows) for space in self.spaces)
        self.hosted: dict[ShardSpace, HostedShard] = {}
        self.step = self.committed = self._commits = 0
        self.failures = FailureLog()
        self.rebuild_left: dict[int, int] = {}
        self._make_store, self._make_dense = make_store, make_dense
        self._seed, self._policy, self._hooks, self._clock = seed, policy, hooks or Hooks(), clock
        # Making a store now lets a spare load what it would otherwise load when it takes over.
        self._record_bytes = tuple(make_store(1, space.dim, torch.empty_like).record_bytes for space in self.spaces)
        self._phase = "start"
        self._updating = self._changed = False
        self.stopping = self.doubts = self.doubted = False
        self._peak_undo_bytes = 0
        self._repaired: RepairReport | None = None
        self._reshape: Reshape | None = None
        self._reshape_considered = view.epoch
        self._last_finished = clock()
        self.live_at_commit = view.live
        self.dense: DenseReplica | None = make_dense() if self.rank in view.dense else None
        self._context = self._context_of(self.layouts, self.hosted)
        self._host_shards(missing=False)
        protection.start(self._context, view)
        self.scrub = protection.make_scrub(policy.scrub_rows_per_step)

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots that this rank runs."""
        return self.view.slots_of(self.rank)

    @property
    def record_bytes(self) -> tuple[int, ...]:
        """Size of a record of each row space."""
        return self._record_bytes

    @property
    def commits(self) -> int:
        """How many commits there have been."""
        return self._commits

    @property
    def _bytes_per_shard(self) -> int:
        return sum(
            size * (layout.data_rows_per_shard + layout.parity_rows_per_shard)
            for size, layout in zip(self._record_bytes, self.layouts, strict=True)
        )

    @property
    def failures_left(self) -> int:
        """How many more ranks may die at once without anything being lost."""
        return self.protection.failures_left(self.view, self.protection.shape, self._lost_since_commit(self.view.live))

    def _lost_since_commit(self, live: Collection[int]) -> int:
        """Failure domains with ranks that were live at the last commit of a step and are not among `live`."""
        return len({self.view.domains[rank] for rank in self.live_at_commit if rank not in live})

    @property
    def failures_left_when_rebuilt(self) -> int:
        """`failures_left` as it will be once nothing is rebuilding any more and everything is re-laid, if it must be."""
        whole = mark_whole(self.view, self.view.rebuilding)
        plan = plan_reshape(whole, self.protection.shape) if self._policy.reshape else None
        shape, view = plan or (self.protection.shape, whole)
        return self.protection.failures_left(view, shape, 0)

    @property
    def rebuild_fraction(self) -> float:
        """Share of the rows of rebuilding shards that is back; 1 when nothing is rebuilding."""
        rows = sum(layout.data_rows_per_shard + layout.parity_rows_per_shard for layout in self.layouts)
        total = rows * len(self.view.rebuilding)
        left = sum(self.rebuild_left.get(shard, rows) for shard in self.view.rebuilding)
        return 1.0 - left / total if total else 1.0

    def enter(self, phase: str) -> None:
        """Name the phase that begins, for hooks and for the record of a failure."""
        self._phase = phase
        self._hooks.phase(self.step, phase)

    # -- the step ---------------------------------------------------------------------------------

    def lookup(
        self, rows: Mapping[int, Sequence[Tensor]], computed: Collection[int] = (), apply_follows: bool = False
    ) -> dict[int, list[Tensor]]:
        """Collective: current values of rows, each slot's rows of each row space as float32 [U, dim].

        `rows[slot][space]` are unique row numbers, int64 [U], for every slot this rank runs (row r of
        a table is row `offset + r` of its space). Lost rows among them are recovered first, or the protection's
        stand-in gives values in their place. Values that
        came ahead with the last `apply` are returned as they came; `rows` must then be its `rows_ahead`, and an `apply` follow.
        `apply_follows`, the same on every rank, lets what nobody waits for come with that `apply`. For slots that are `computed`, that `apply`
        will be given what was computed for this step before a failure: their values are not returned, and need not be there yet. None may
        be with a stand-in; whoever uses it must do so wherever the same step begins again and `confirmed` is true, since a step may be resumed on
        that (`ecrm/engine/resume.py`). Raises StepAborted after a failure.
        """
        assert self.protection.stand_in is None or not computed
        with self.recovering():
            self._reshape_if_needed()
            self.enter("lookup")
            came_ahead, late = self._ahead is not None, {}
            resumes = apply_follows and self._resumed is not None
            ready = self._resumed if resumes else self._ahead
            self._ahead = self._resumed = self._resume = None
            assert not resumes or set(rows) == set(computed)
            self._lookup = ready or self._ask(rows, computed)
            self._recovered = False
            if self.view.rebuilding and self._lookup.repair is not None:
                late = self._answer_repair(self._lookup, at_once=not (came_ahead or apply_follows))
            self.confirmed = came_ahead and not late
            return self._lookup.rows(late)

    def _ask(self, rows: Mapping[int, Sequence[Tensor]], computed: Collection[int]) -> Lookup:
        """Ask shards for rows, and begin a round of repair if anything is rebuilding."""
        stand_in, budget = self.protection.stand_in, self._rebuild_rows
        if self.view.rebuilding and stand_in is not None:  # a shard that this makes whole is asked for its rows
            self._repair({}, budget)
        lookup = Lookup(self._where, rows, computed=computed)
        lookup.hear(self.transport.exchange(lookup.requests()))
        if self.view.rebuilding and stand_in is None and not self.protection.repairs_ahead:
            self._repair(lookup.shard_side.missing(), budget)
        lookup.take(Riders.of(self.transport.exchange(lookup.replies({}))))
        return lookup

    @property
    def _where(self) -> Where:
        return Where(self.view, self.layouts, self.hosted, self.protection, self._rebuild_rows)

    @property
    def _rebuild_rows(self) -> int:
        """Background rows of a round of repair: none in the first one after a recovery, for which all ranks stand still."""
        return 0 if self._recovered else self._policy.rebuild_rows_per_step

    @property
    def repairs_ahead(self) -> bool:
        """Whether `apply` has a use for `rows_soon`; the same on all ranks."""
        return self._where.repairs_ahead

    def _answer_repair(self, lookup: Lookup, at_once: bool) -> dict[int, list[Tensor]]:
        """At a commit: recover the rows that slots wait for and send them.

        Units of other rows come along and are decoded then; where no slot waits they ride along with the step's results, and cost no
        exchange, unless that must be `at_once`, since an `apply` may not come next.
        """
        self.enter("repair")
        repair, late = lookup.repair, {}
        self._note_repair(repair.report)
        if repair.urgent:
            repair.finish(self.transport.exchange(repair.answers()))
        self._riding.board(repair.rest())
        if repair.urgent:
            late = self.transport.exchange(lookup.shard_side.late_replies())
        lookup.repair_rides = not repair.urgent and not at_once
        if not lookup.repair_rides:
            repair.finish(self._riding.alight())
        return late

    def apply(
        self,
        row_gradients: Mapping[int, Sequence[Tensor]],
        contributions: Mapping[int, Tensor],
        commit: bool = False,
        rows_ahead: Mapping[int, Sequence[Tensor]] | None = None,
        rows_soon: Mapping[int, Sequence[Tensor]] | None = None,
    ) -> None:
        """Collective: finish the step begun by `lookup`.

        `row_gradients[slot][space]`, float32 [U, dim], are summed gradients of the rows looked up;
        `contributions[slot]`, float32 [P], goes to every dense replica. Commits when the interval is
        full, while anything is rebuilding, when `commit` says so, or when a rank asks to stop: then all
        ranks have `stopping` set. `rows_ahead`, given by every rank or by none, are the rows of the next
        `lookup`: they ride along, with what a round of repair asks for, and save it two exchanges. `rows_soon`, with which any rank may
        go without, are likely those of the `lookup` after that: with `repairs_ahead`, those that are missing are recovered before slots
        have to wait for them. Raises StepAborted after a failure.
        """
        with self.recovering():
            self.enter("update")
            self._updating = True
            self._resume = Resume(self.step, self._lookup, self.view) if self.confirmed and self.protection.foresees_repair else None
            looks_ahead = rows_ahead is not None and (not self.view.rebuilding or self.protection.repairs_ahead)
            ahead = Lookup(self._where, rows_ahead, rows_soon) if looks_ahead else None
            came = Results.of(self.transport.exchange(self._results(row_gradients, contributions, ahead)))
            if self._lookup.repair_rides:  # before the rows that it read are updated
                self._lookup.repair.finish(self._riding.alight())
            self._changed = True
            self._lookup.shard_side.update(came.gradients, self.protection.keeps_deltas)
            self._note_undo_bytes()
            riders: dict[int, list[Part]] = {}
            if ahead is not None:
                ahead.hear(came.requests)
                riders = ahead.replies(came.soon)
            if self.dense is not None:
                total = SlicedSum.reduce(came.dense)
                for holder in self.view.dense:
                    riders.setdefault(holder, []).extend((torch.tensor([DENSE]), total))
            self._riding.board(riders)
            committing = commit or came.stop or bool(self.view.rebuilding) or self._commit_is_due()
            held = ahead.shard_side if ahead is not None and ahead.repair is None else None  # with a repair some of it comes late
            if committing:
                self._protect(held)
            self.enter("dense")
            rode = Riders.of(self._riding.alight())
            if ahead is not None:
                ahead.take(rode)
            if committing and held is not None:
                self.protection.retain(ahead.slot_side, rode.replies)
            if self.dense is not None:
                self.dense.apply(SlicedSum(self.view.dense).assemble(rode.dense))
            if committing and self.scrub is not None and not self.view.rebuilding:
                self.enter("scrub")
                self.scrub.check(self.view)
            self.step += 1
            self._updating = self._changed = False
            if committing:
                self._phase = "commit"
                self._hooks.phase(self.step - 1, "commit")
                self._agree_on_commit()
                self.stopping = self.stopping or came.stop
            if not self.stopping and not (committing and self._put_right):
                self._ahead = ahead
            self._resume = None
        self._step_finished()

    def commit(self) -> None:
        """Collective, between steps: commit what is not yet. Raises StepAborted after a failure."""
        with self.recovering():
            if self.committed < self.step:
                self._protect()
                self._agree_on_commit()

    def _protect(self, ahead: ShardRequests | None = None) -> None:
        self.enter("parity")
        self.protection.protect({key: h.deltas_since_commit() for key, h in self.hosted.items()}, self.view, ahead)
        self._note_undo_bytes()

    def heed_stop(self) -> None:
        """Collective, between steps: raise StopAgreed on every rank if any asks to stop; StepAborted after a failure."""
        with self.recovering():
            self.stopping = not self.transport.agree(not (self.stopping or self._hooks.asks()))
        if self.stopping:
            raise StopAgreed

    def _results(
        self,
        row_gradients: Mapping[int, Sequence[Tensor]],
        contributions: Mapping[int, Tensor],
        ahead: Lookup | None,
    ) -> dict[int, list[Tensor]]:
        """What this rank's slots send: row gradients to shards, slices to dense holders, and the next lookup's requests."""
        outgoing = self._lookup.slot_side.gradients(row_gradients)
        self._lookup.slot_side.keep(row_gradients, self.step)
        for slot, contribution in sorted(contributions.items()):
            for holder, part in SlicedSum(self.view.dense).slices(contribution).items():
                outgoing.setdefault(holder, []).extend((torch.tensor([DENSE, slot]), part))
        for rank, tensors in ahead.requests().items() if ahead is not None else ():
            outgoing.setdefault(rank, []).extend(tensors)
        for rank in self.view.live if self._hooks.asks() else ():
            outgoing.setdefault(rank, []).extend((torch.tensor([STOP]), torch.empty(0)))
        return outgoing

    def _note_undo_bytes(self) -> None:
        undo_bytes = self.protection.log_bytes + sum(hosted.log_bytes for hosted in self.hosted.values())
        self._peak_undo_bytes = max(self._peak_undo_bytes, undo_bytes)

    def _commit_is_due(self) -> bool:
        return self.step + 1 - self.committed >= self._policy.commit_interval

    def _agree_on_commit(self) -> None:
        self.protection.prepare(self.step, self.dense)
        if not self.transport.agree(self.scrub is None or self.scrub.clean):
            self.scrub.tell()
            if not self.transport.agree(True):
                raise AssertionError("a live rank refused the commit")
        self._accept_commit()
        self._hooks.committed()

    def _accept_commit(self) -> None:
        """Everything up to `step` can no longer be taken back."""
        self._commits += 1
        if self.step > self.committed:
            self.live_at_commit = self.view.live
        self.committed = self._context.committed = self.step
        if self._reshape is not None:
            self._adopt_reshaped()
        for hosted in self.hosted.values():
            hosted.committed()
        self.protection.committed()
        if self.dense is not None:
            self.dense.commit()
        found = [] if self.scrub is None else self.scrub.committed()
        self._put_right = bool(found)
        for finding in found:
            self._hooks.event(corruption_event(finding, self.step, self.spaces, self.protection.shape))
        self._count_whole()

    def _step_finished(self) -> None:
        now = self._clock()
        for failure in self.failures.step_finished(self._last_finished, now):
            self._hooks.event({"event": "resumed", "ranks": list(failure.ranks), "stall_seconds": failure.stall_seconds})
        self._last_finished = now

    # -- rebuilding -------------------------------------------------------------------------------

    def _repair(self, wanted: dict[ShardSpace, Tensor], budget: int) -> None:
        """One round of repair; what it restores and learns counts from the next commit on."""
        self.enter("repair")
        self._note_repair(self.protection.repair(wanted, budget, self.view))

    def _note_repair(self, report: RepairReport) -> None:
        self._repaired, self.rebuild_left = report, report.left

    def _count_whole(self) -> None:
        """Shards that had nothing missing at the last round of repair rebuild no more."""
        report, self._repaired = self._repaired, None
        whole = [] if report is None else [shard for shard in self.view.rebuilding if report.left[shard] == 0]
        if not whole:
            return
        self.view = mark_whole(self.view, whole)
        if not self.view.rebuilding:
            self.live_at_commit = self.view.live
        for failure in self.failures.shards_whole(whole, self.view.rebuilding, report.on_demand, self._clock()):
            self._hooks.event(rebuilt_event(failure, self.failures_left))
        if accounts := self.protection.accounts(whole):
            self.failures.restored += accounts
            self._hooks.event(restored_event(self.step, self.view, accounts))

    # -- whole again on fewer ranks -----------------------------------------------------------------

    def _reshape_if_needed(self) -> None:
        """At a commit with nothing rebuilding, where the view cannot keep stripe members apart: lay everything out anew."""
        due = self.view.epoch != self._reshape_considered and not self.view.rebuilding and self.step == self.committed
        if not due or not self._policy.reshape:
            return
        self._reshape_considered = self.view.epoch
        plan = plan_reshape(self.view, self.protection.shape)
        if plan is None:
            return
        began = self._clock()
        self._scrub_once_round()  # parity is encoded anew: what is wrong by then is never found
        self.enter("reshape")
        self._reshape = Reshape(*plan, self._context, self.protection, self._new_store, began)
        self._reshape.run()
        self._agree_on_commit()

    def _adopt_reshaped(self) -> None:
        """From this commit on the new layout is the one."""
        reshape, self._reshape, self._ahead, self._resumed = self._reshape, None, None, None
        self.view, self.layouts, self.hosted = reshape.view, reshape.layouts, reshape.hosted
        self.protection = reshape.protection
        self.live_at_commit = self.view.live
        if self.scrub is not None:
            self.scrub = self.protection.make_scrub(self._policy.scrub_rows_per_step, self.scrub.report)
        self._context = reshape.context
        self._context.committed = self.committed
        self._reshape_considered = self.view.epoch
        self._hooks.event(
            reshaped_event(self.step, reshape.shape, self._clock() - reshape.began, reshape.moved_bytes, self.failures_left)
        )
        self._hooks.event({"event": "view", "step": self.step, "view": self.view})

    def _context_of(self, layouts: Sequence[RowLayout], hosted: dict[ShardSpace, HostedShard]) -> ProtectionContext:
        return ProtectionContext(self.transport, tuple(layouts), self._record_bytes, hosted, self._initial, allocate=self._allocate)

    def _initial(self, space: int, rows: Tensor) -> Tensor:
        return initial_rows(self.spaces[space], rows, self._seed)

    def rebuild_all(self) -> None:
        """Collective, at a commit: recover everything that is still missing. Raises StepAborted, or StopAgreed."""
        self._ahead = self._resumed = None  # what they wait for comes now
        with self.recovering():
            while self.view.rebuilding:
                self._repair({}, max(1 << 16, self._policy.rebuild_rows_per_step))
                self._agree_on_commit()
                self.heed_stop()

    def scrub_all(self) -> None:
        """Collective, at a commit, nothing rebuilding: scrub once round, if at all. Raises StepAborted after a failure."""
        with self.recovering():
            self._scrub_once_round()

    def _scrub_once_round(self) -> None:
        if self.scrub is None:
            return
        enough = self.scrub.report.rows_checked + self.scrub.rows_per_pass
        while self.scrub.report.rows_checked < enough:
            self.enter("scrub")
            self.scrub.check(self.view, at_least=1 << 16)
            self._agree_on_commit()

    def verify_parity(self) -> VerifyReport:
        """Collective, at a commit, nothing rebuilding: re-encode all rows and compare; totals over all ranks."""
        with self.recovering():
            mine = self.protection.verify(self.view)
            shared = self.transport.share([torch.tensor([mine.stripes, mine.mismatches])])
            stripes, mismatches = torch.stack([tensors[0] for tensors in shared.values()]).sum(0).tolist()
            return VerifyReport(stripes, mismatches)

    @property
    def tensors(self) -> list[Tensor]:
        """The live tensors of all rows and redundancy held on this rank."""
        return [part for hosted in self.hosted.values() for part in hosted.store.memory] + list(self.protection.memory)

    def memory_of_a_shard(self) -> list[Tensor]:
        """New memory such as `allocate` gives for one more shard's rows and redundancy, of which the system has handed out nothing yet."""
        memory: list[Tensor] = []
        for space, layout, size in zip(self.spaces, self.layouts, self._record_bytes, strict=True):
            record = self._make_store(1, space.dim, torch.empty_like).memory  # a lone one: it may be no time to load FBGEMM
            memory += [lazy_zeros(layout.data_rows_per_shard, *part.shape[1:]) for part in record]
            memory.append(lazy_zeros(layout.parity_rows_per_shard, size, dtype=np.uint8))
        return memory

    def memory(self) -> Memory:
        """Collective: what every rank holds. Raises PeerFailure as transport calls do."""
        held = (
            sum(hosted.store.memory_bytes for hosted in self.hosted.values()),
            self.protection.parity_bytes,
            self._peak_undo_bytes,
            0 if self.dense is None else self.dense.memory_bytes,
        )
        return gather_memory(self.transport, len(self.view.shards_of(self.rank)), held)

    # -- failures ---------------------------------------------------------------------------------

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """Around collective calls of the transport: turn a peer's failure into a recovery and StepAborted.

        Whatever else goes wrong while a peer dies is put down to its death; with nobody dead it is an
        error of this program.
        """
        try:
            if self.view.live != self.transport.live:
                raise PeerFailure("a rank died before the first step")
            yield
        except PeerFailure:
            self.recover()
            raise StepAborted from None
        except (EcrmError, StepAborted, StopAgreed):
            raise
        except Exception:
            before = self.view.live
            self.recover()
            if self.view.live == before:
                raise
            raise StepAborted from None

    def recover(self) -> None:
        """Collective among survivors: agree on the commit, go back to it, share out the dead ranks' roles.

        A rank that `doubts` its input may begin one, with nobody dead. Raises Unrecoverable, on every survivor, when more was lost than the protection covers.
        """
        began, phase = self._clock(), self._phase
        resume, self._resume = self._resume, None
        self._ahead = self._lookup = self._resumed = None  # with what they hold
        self._recovered = True
        begun, rollbacks = self.step + self._updating, self.rollbacks
        step = self.step - (phase == "commit")
        redone = self.step - self.committed + self._updating
        before = self.view
        while True:
            try:
                self.transport.shrink()
                self._hooks.phase(self.step, "recover")
                heir, agreed, self._resumed = None, False, None
                try:
                    ledger = self._return_to_commit(resume)
                    if len(before.shards) != len(self.view.shards):
                        before = self.view  # a reshape was committed: shards have new numbers
                    last = self.view
                    self._take_over()
                    if ledger.resumes == self.committed:
                        self._resumed = resume.again(self._where, last, self.transport.live, ledger.told)
                    agreed = bool(ledger.dense) and not set(self.view.dense).difference(ledger.dense)  # and nothing was sent after it
                    heir = spread_dense(self.transport, self.view.dense, ledger.dense, self.dense, self._make_dense)
                except Unrecoverable as error:
                    self._roll_back(error, began)
                    agreed, self._resumed = False, None
                    if len(before.shards) != len(self.view.shards):
                        before = self.view
                if agreed or self.transport.agree(True):
                    break
            except PeerFailure:
                continue
        self._state_lost = False
        if heir is not None:
            self.dense = heir
        if self.rollbacks > rollbacks:
            redone = max(begun - self.committed, 0)
        dead = tuple(rank for rank in before.live if rank not in self.transport.live)
        if dead:
            self._record_failure(dead, before, step, phase, redone, began)
        if self.rollbacks > rollbacks:
            self.failures.shards_whole(list(range(len(before.shards))), (), {}, self._clock())
        self._hooks.event({"event": "view", "step": self.step, "view": self.view})
        self._hooks.recovered()

    def _return_to_commit(self, resume: Resume | None) -> Ledger:
        """Agree with the survivors on the last commit and the newest view; undo what is past that commit. Returns what they have said."""
        mine = Ledger(
            self._commits, self.view, self.step + self._changed - self.committed, self.stopping or self._hooks.asks(), self.doubts,
            self._state_lost, () if self.dense is None else (self.rank,), -1 if resume is None else resume.step,
            {} if resume is None else {self.rank: resume.told(self.transport.live)},
        )  # fmt: skip
        agreed = mine.agreed(self.transport)
        self.stopping, self.doubted = agreed.asks, agreed.doubts
        if agreed.state_lost:
            raise Unrecoverable("a rank died while all were rolling back")
        commits, begun = agreed.commits, agreed.begun
        if begun and not self.protection.keeps_deltas and self.view.live == self.transport.live:  # deaths: _take_over
            raise Unrecoverable(
                f"ranks lost touch with each other, none of them died: protection {self.protection.name} cannot take back "
                f"the updates since step {self.committed}"
            )
        if commits > self._commits:
            assert commits == self._commits + 1, f"rank {self.rank} has {self._commits} commits, another {commits}"
            self._accept_commit()
            self._hooks.committed()
        elif self._policy.skip_undo:
            self._accept_commit_without_undo()
        else:
            for hosted in self.hosted.values():
                hosted.undo()
            self.protection.undo()
            if self.scrub is not None:
                self.scrub.undo()
            self._repaired, self._reshape, self.rebuild_left = None, None, {}
            self._reshape_considered = -1
            if self.dense is not None:
                self.dense.undo()
        if agreed.view.epoch > self.view.epoch:
            self.view = agreed.view
        self.step = self.committed
        self._updating = self._changed = False
        return agreed

    def _accept_commit_without_undo(self) -> None:
        """The test-only wrong way: keep uncommitted updates and forget how to take them back."""
        committed, commits, self._reshape = self.committed, self._commits, None
        self._accept_commit()
        self.committed, self._commits = committed, commits

    def _take_over(self) -> None:
        """Adopt the next view: host its shards, empty at first."""
        dead = [rank for rank in self.view.live if rank not in self.transport.live]
        if dead and not self.protection.keeps_deltas:
            names = f"rank{'s' if len(dead) > 1 else ''} {', '.join(map(str, dead))}"
            raise Unrecoverable(f"{names} died: protection {self.protection.name} cannot bring anything back")
        if dead:
            protection = self.protection
            protection.check_losses(self.view, dead, self._lost_since_commit(self.transport.live), self.committed)
            self.view = plan_recovery(
                self.view, dead, protection.shape, self._policy.dense_replicas,
                protection.in_words, protection.any_shards_may_be_lost, protection.rebuilding_may_move,
            )  # fmt: skip
        self._host_shards(missing=True)
        self.protection.adopt(self.view)

    def _host_shards(self, missing: bool) -> None:
        """Hold exactly the shards that the view gives this rank; new ones start with their initial values or missing."""
        mine = self.view.shards_of(self.rank)
        for key in [key for key in self.hosted if key[0] not in mine]:
            del self.hosted[key]
        for shard in mine:
            for space, layout in enumerate(self.layouts):
                if (shard, space) not in self.hosted:
                    store = self._new_store(shard, space, layout, self.protection)
                    self.hosted[shard, space] = HostedShard(store, layout.data_rows_per_shard, missing)

    def _new_store(self, shard: int, space: int, layout: RowLayout, protection: Protection) -> Store:
        """A store of a shard's rows of a row space, none updated yet unless `protection` gives it memory that holds some."""

        def initial(local: Tensor) -> Tensor:
            return self._initial(space, layout.rows_of(shard, local))

        allocate = protection.allocator(shard, space) or self._allocate
        return self._make_store(layout.data_rows_per_shard, self.spaces[space].dim, initial, allocate)

    def resume(self) -> None:
        """Collective, before the first step: go on from the durable tier, whoever dies meanwhile.

        Raises an EcrmError on every rank where there is nothing to go on from.
        """
        try:
            if self.view.live != self.transport.live:
                raise PeerFailure("a rank died before the first step")
            self._roll_back(Unrecoverable("nothing to resume from"), self._clock(), told=False)
            if not self.transport.agree(True):
                raise PeerFailure("a rank died while all were resuming")
            self._state_lost = False
        except PeerFailure:
            self._state_lost = True
            self.recover()

    def _roll_back(self, why: Unrecoverable, began: float, told: bool = True) -> None:
        """Collective: load the newest checkpoint on the ranks that are left; raises `why` without a durable tier."""
        if self._durable is None:
            raise why
        self._state_lost, begun, shape = True, self.step + self._updating, self.protection.shape
        self._hooks.phase(self.step, "rollback")
        self.hosted.clear()  # makes room; nothing of what is held is used any more
        self.protection = self.protection.with_shape(shape)
        loaded = Rollback(
            self._durable, self.transport, (self._commits, self.view, shape), [space.rows for space in self.spaces],
            self._context_of, self.protection, self._new_store, self._policy.dense_replicas,
        )  # fmt: skip
        self.view, self.layouts, self.hosted, self.protection = loaded.view, loaded.layouts, loaded.hosted, loaded.protection
        self._context = loaded.context
        self._ahead = self._reshape = self._repaired = None
        self.rebuild_left, self._reshape_considered, self._put_right, self._updating = {}, -1, False, False
        self.step = self.committed = self._context.committed = loaded.step
        self._commits = loaded.commits
        self.live_at_commit = self.view.live
        report = None if self.scrub is None else self.scrub.report
        self.scrub = self.protection.make_scrub(self._policy.scrub_rows_per_step, report)
        self.dense = self._make_dense() if self.rank in self.view.dense else None
        if self.dense is not None and loaded.dense is not None:
            self.dense.load(loaded.dense)
        self.rollbacks += 1
        if told:
            self._hooks.event(rolled_back_event(self.step, self.view, begun, str(why), self._clock() - began))

    def _record_failure(
        self, dead: tuple[int, ...], before: View, step: int, phase: str, redone: int, began: float
    ) -> None:
        shards = tuple(shard for shard, host in enumerate(before.shards) if host in dead)
        slots = tuple(slot for slot, host in enumerate(before.slots) if host in dead)
        failure = Failure(
            ranks=dead,
            step=step,
            phase=phase,
            redone_steps=redone,
            noticed_at=began,
            recovery_seconds=self._clock() - began,
            shards=shards,
            slots=slots,
            rebuilt_bytes=len(shards) * self._bytes_per_shard,
        )
        self.failures.failures.append(failure)
        self._hooks.event(
            failure_event(failure, before, self.view, self.committed, self.failures_left, self.failures_left_when_rebuilt)
        )

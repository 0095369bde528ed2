"""The engine: one bulk-synchronous step over shards and slots, on a state (`state.py`) that outlives deaths (`recovery.py`).

Nowhere else do transport, storage, protection and views meet. A training loop drives it:

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
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from ecrm.allocate import Allocate, Room, lazy_zeros
from ecrm.engine.dense import DenseReplica, SlicedSum
from ecrm.engine.hooks import EnginePolicy, Hooks, StopAgreed
from ecrm.engine.lookup import Lookup, stray_row
from ecrm.engine.recovery import Recovery
from ecrm.engine.reshape import Reshape
from ecrm.engine.rollback import Durable
from ecrm.engine.shard_stores import ShardStores
from ecrm.engine.step_replay import Resume
from ecrm.placement.assignment import plan_reshape
from ecrm.placement.tables import Table
from ecrm.placement.view import View
from ecrm.protection.base import Protection, RepairReport, VerifyReport
from ecrm.requests.routing import DENSE, NOTE, STOP, TROUBLE, Results, Riders, ShardRequests
from ecrm.storage import StoreFactory
from ecrm.storage.hosted import ShardSpace
from ecrm.transport.base import PeerFailure, Transport
from ecrm.transport.message import Came, Part
from ecrm.transport.piggyback import RidingTransport


class Engine(Recovery):
    """One rank's part in the run: its state (`EngineState`), what becomes of it when ranks die (`Recovery`), and here the steps.

    `confirmed` is whether all rows that the last `lookup` returned here had come with the `apply`
    before it: if the step then begins again, it is since an agreement has confirmed that nobody
    died while they came.
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
        self._riding = RidingTransport(transport)
        stores = ShardStores(make_store, tables, seed, allocate, transport.lendable)
        super().__init__(
            self._riding, stores, view, protection, make_dense, policy, hooks, clock, durable
        )
        self.confirmed = False
        self._gradients: dict[tuple[int, int], Room] = {}
        self._last_finished = clock()

    def enter(self, phase: str) -> None:
        """Name the phase that begins, for hooks and for the record of a failure."""
        self._phase = phase
        self._hooks.phase(self.step, phase)

    def lookup(
        self,
        rows: Mapping[int, Sequence[Tensor]],
        computed: Collection[int] = (),
        apply_follows: bool = False,
    ) -> dict[int, list[Tensor]]:
        """Collective: current values of rows, each slot's rows of each row space as float32 [U, dim].

        `rows[slot][space]` are unique row numbers, int64 [U], for every slot this rank runs (row r
        of a table is row `offset + r` of its space). Lost rows among them are recovered first, or
        the protection's stand-in gives values in their place. Values that came ahead with the last
        `apply` are returned as they came; `rows` must then be its `rows_ahead`, and an `apply`
        follow. `apply_follows`, the same on every rank, lets what nobody waits for come with that
        `apply`. A lookup without it only reads: with a stand-in it restores nothing, which each
        step's must, and the stand-in remembers nothing of it. For slots that are `computed`, that
        `apply` will be given what was computed for this step before a failure: their values are not
        returned, and need not be there yet. None may be with a stand-in; whoever uses it must do so
        wherever the same step begins again and `confirmed` is true, since a step may be resumed on
        that (`ecrm/engine/step_replay.py`). Raises StepAborted after a failure.
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
            if ready is None:
                self._check(rows, self.step)
            self._lookup = ready or self._ask(rows, computed, restores=apply_follows)
            self._recovered = False
            if self.view.rebuilding and self._lookup.repair is not None:
                late = self._answer_repair(self._lookup, at_once=not (came_ahead or apply_follows))
            self.confirmed = came_ahead and not late
            return self._lookup.rows(late, remember=apply_follows)

    def _check(self, rows: Mapping[int, Sequence[Tensor]], step: int) -> None:
        """Before any of these are asked for: end the run, on all ranks, where a row does not exist."""
        if problem := stray_row(rows, self.spaces):
            self.refuse(f"step {step}, {problem}")

    def _ask(
        self, rows: Mapping[int, Sequence[Tensor]], computed: Collection[int], restores: bool
    ) -> Lookup:
        """Ask shards for rows, and begin a round of repair if anything is rebuilding; with a stand-in only where this `restores`."""
        stand_in, budget = self.protection.stand_in, self._rebuild_rows
        # a shard that this makes whole is asked for its rows
        if self.view.rebuilding and stand_in is not None and restores:
            self._repair({}, budget)
        lookup = Lookup(self._where, rows, computed=computed)
        lookup.hear(self.transport.exchange(lookup.requests()))
        if self.view.rebuilding and stand_in is None and not self.protection.repairs_ahead:
            self._repair(lookup.shard_side.missing(), budget)
        lookup.take(Riders.of(self.transport.exchange(lookup.replies({}))))
        return lookup

    @property
    def repairs_ahead(self) -> bool:
        """Whether `apply` has a use for `rows_soon`; the same on all ranks."""
        return self._where.repairs_ahead

    def _answer_repair(self, lookup: Lookup, at_once: bool) -> dict[int, list[Came]]:
        """At a commit: recover the rows that slots wait for and send them.

        Units of other rows come along and are decoded then; where no slot waits they ride along
        with the step's results, and cost no exchange, unless that must be `at_once`, since an
        `apply` may not come next.
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

    def gradient_room(self, slot: int, space: int, rows: int) -> Tensor:
        """Where a slot that this rank runs may sum the gradients of so many rows of a space for the next `apply`, float32 [rows, dim], holding
        anything: from there they reach ranks of this host uncopied. From `lookup` on it may be written; it is the memory of the last call's result
        for the slot and space."""
        if (slot, space) not in self._gradients:
            self._gradients = {
                key: room for key, room in self._gradients.items() if key[0] in self.slots
            }
            self._gradients[slot, space] = Room(self.spaces[space].dim, self.transport.lendable)
        return self._gradients[slot, space].of(rows)

    def apply(
        self,
        row_gradients: Mapping[int, Sequence[Tensor]],
        contributions: Mapping[int, Tensor],
        commit: bool = False,
        rows_ahead: Mapping[int, Sequence[Tensor]] | None = None,
        rows_soon: Mapping[int, Sequence[Tensor]] | None = None,
        notes: Mapping[int, Tensor] | None = None,
        troubles: Mapping[int, str] | None = None,
    ) -> None:
        """Collective: finish the step begun by `lookup`.

        `row_gradients[slot][space]`, float32 [U, dim], are summed gradients of the rows looked up;
        `contributions[slot]`, float32 [P], goes to every dense replica. Commits when the interval
        is full, while anything is rebuilding, when `commit` says so, or when a rank asks to stop:
        then all ranks have `stopping` set. `rows_ahead`, given by every rank or by none, are the
        rows of the next `lookup`: they ride along, with what a round of repair asks for, and save
        it two exchanges. `rows_soon`, with which any rank may go without, are likely those of the
        `lookup` after that: with `repairs_ahead`, those that are missing are recovered before slots
        have to wait for them. `notes[slot]`, uint8 [N], goes to the `log` of every dense holder: a
        note on this step, which is there once, however often the step is done. `troubles[slot]` is
        told to all ranks: the hook `troubled` gets those of all slots, on every rank, before
        anything is changed, and may end the run. Raises StepAborted after a failure.
        """
        with self.recovering():
            self.enter("update")
            self._updating = True
            self._resume = (
                Resume(self.step, self._lookup, self.view)
                if self.confirmed and self.protection.foresees_repair
                else None
            )
            looks_ahead = rows_ahead is not None and (
                not self.view.rebuilding or self.protection.repairs_ahead
            )
            if looks_ahead:
                self._check(rows_ahead, self.step + 1)
                self._check(rows_soon or {}, self.step + 2)
            ahead = Lookup(self._where, rows_ahead, rows_soon) if looks_ahead else None
            came = Results.of(
                self.transport.exchange(
                    self._results(row_gradients, contributions, ahead, notes or {}, troubles or {})
                )
            )
            if came.troubles:
                self._heed(came.troubles)
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
                    riders.setdefault(holder, []).extend(((DENSE,), total))
            self._riding.board(riders)
            committing = commit or came.stop or bool(self.view.rebuilding) or self._commit_is_due()
            # with a repair some of it comes late
            held = ahead.shard_side if ahead is not None and ahead.repair is None else None
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
                self.log.add(self.step, came.notes)
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
        self.protection.protect(
            {key: h.deltas_since_commit() for key, h in self.hosted.items()}, self.view, ahead
        )
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
        notes: Mapping[int, Tensor],
        troubles: Mapping[int, str],
    ) -> dict[int, list[Part]]:
        """What this rank's slots send: row gradients to shards, slices and notes to dense holders, and the next lookup's requests."""
        outgoing = self._lookup.slot_side.gradients(row_gradients)
        self._lookup.slot_side.keep(row_gradients, self.step)
        for slot, contribution in sorted(contributions.items()):
            for holder, part in SlicedSum(self.view.dense).slices(contribution).items():
                outgoing.setdefault(holder, []).extend(((DENSE, slot), part))
                if slot in notes:
                    outgoing[holder].extend(((NOTE, slot), notes[slot]))
        for rank, tensors in ahead.requests().items() if ahead is not None else ():
            outgoing.setdefault(rank, []).extend(tensors)
        for rank in self.view.live if self._hooks.asks() else ():
            outgoing.setdefault(rank, []).extend(((STOP,), torch.empty(0)))
        for slot, trouble in troubles.items():
            said = torch.tensor(list(trouble.encode()), dtype=torch.uint8)
            for rank in self.view.live:
                outgoing.setdefault(rank, []).extend(((TROUBLE, slot), said))
        return outgoing

    def _heed(self, troubles: Mapping[int, str]) -> None:
        """Collective, on every rank or none: pass on the troubles of slots, once it is certain that all have heard it."""
        if not self.transport.agree(True):
            raise PeerFailure("a rank died while others told of trouble")
        self._hooks.troubled(self.step, troubles)

    def _commit_is_due(self) -> bool:
        return self.step + 1 - self.committed >= self._policy.commit_interval

    def _agree_on_commit(self) -> None:
        self.protection.prepare(self.step, None if self.dense is None else self.present_dense)
        if not self.transport.agree(self.scrub is None or self.scrub.clean):
            self.scrub.tell()
            if not self.transport.agree(True):
                raise AssertionError("a live rank refused the commit")
        self._accept_commit()
        self._hooks.committed()

    def _step_finished(self) -> None:
        now = self._clock()
        for failure in self.failures.step_finished(self._last_finished, now):
            self._hooks.event(
                {
                    "event": "resumed",
                    "ranks": list(failure.ranks),
                    "stall_seconds": failure.stall_seconds,
                }
            )
        self._last_finished = now

    def _repair(self, wanted: dict[ShardSpace, Tensor], budget: int) -> None:
        """One round of repair; what it restores and learns counts from the next commit on."""
        self.enter("repair")
        self._note_repair(self.protection.repair(wanted, budget, self.view))

    def _note_repair(self, report: RepairReport) -> None:
        self._repaired, self.rebuild_left = report, report.left

    def _reshape_if_needed(self) -> None:
        """At a commit with nothing rebuilding, where the view cannot keep stripe members apart: lay everything out anew."""
        due = (
            self.view.epoch != self._reshape_considered
            and not self.view.rebuilding
            and self.step == self.committed
        )
        if not due or not self._policy.reshape:
            return
        self._reshape_considered = self.view.epoch
        plan = plan_reshape(self.view, self.protection.shape)
        if plan is None:
            return
        began = self._clock()
        self._scrub_once_round()  # parity is encoded anew: what is wrong by then is never found
        self.enter("reshape")
        self._reshape = Reshape(*plan, self._context, self.protection, self.stores, began)
        self._reshape.run()
        self._agree_on_commit()
        self._ahead = self._resumed = None

    def rebuild_all(self, in_time: Callable[[], bool] | None = None) -> bool:
        """Collective, at a commit: recover everything that is still missing; whether all of it is back.

        With `in_time` it ends early once a rank is not; without it raises StopAgreed where one asks
        to stop. Raises StepAborted after a failure.
        """
        self._ahead = self._resumed = None  # what they wait for comes now
        with self.recovering():
            while self.view.rebuilding:
                self._repair({}, max(1 << 16, self._policy.rebuild_rows_per_step))
                self._agree_on_commit()
                if in_time is None:
                    self.heed_stop()
                elif not self.transport.agree(in_time()):
                    break
        return not self.view.rebuilding

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
            stripes, mismatches = (
                torch.stack([tensors[0] for tensors in shared.values()]).sum(0).tolist()
            )
            return VerifyReport(stripes, mismatches)

"""The engine: one bulk-synchronous step over shards and slots, on a state that outlives deaths.

Nowhere else do transport, storage, protection and views meet. A training loop drives it:

    while engine.step < steps:
        try:
            rows = engine.lookup(requests_of(engine.step, engine.slots), apply_follows=True)
            ...                                   # forward and backward, local to the slot
            engine.apply(row_gradients, dense_contributions)
        except StepAborted:
            continue                              # engine.step and engine.slots may have changed

Every live rank calls the same methods in the same order, with empty requests where it runs no slot.

A step has two exchanges and an agreement. With the first go what slots have computed, what they ask
for the next step, and the rest of a round of repair. With the second go what keeps redundancy up to
date, the next step's rows, and the slices of the dense sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from ecrm.base.allocate import CPU, Allocate, ReusableBuffer, ZerosOn, lazy_zeros
from ecrm.engine.asked_before import AskedBefore
from ecrm.engine.dense import DenseReplica, SlicedSum
from ecrm.engine.hooks import EnginePolicy, Hooks, StopAgreed
from ecrm.engine.in_flight import StepInFlight
from ecrm.engine.lookup import Lookup, stray_row
from ecrm.engine.recovery import Recovery
from ecrm.engine.replica_check import ReplicaCheck, compare_replicas
from ecrm.engine.reshape import Reshape
from ecrm.engine.rollback import Durable
from ecrm.engine.shard_stores import ShardStores
from ecrm.engine.state import EngineState
from ecrm.engine.step_replay import StepReplay
from ecrm.errors import ChangedDataError, ReplicasDiffer
from ecrm.placement.assignment import plan_reshape
from ecrm.placement.sparse_optimizer import SparseRate, factor
from ecrm.placement.tables import Table
from ecrm.placement.view import View
from ecrm.protection.base import Protection, RepairReport, VerifyReport
from ecrm.requests.routing import (
    DENSE,
    ENDS,
    NOTE,
    OVER,
    SLOT_STATE,
    STOP,
    TROUBLE,
    ShardRequests,
    StepReplies,
    StepResults,
)
from ecrm.storage import StoreFactory
from ecrm.storage.hosted import ShardSpace
from ecrm.transport.base import PeerFailure, Transport
from ecrm.transport.message import Part, Received, tensors
from ecrm.transport.piggyback import Incoming, Outgoing, exchange, exchange_rounds
from ecrm.transport.pinned import rows_to_send
from ecrm.transport.staged import StagedTransport


class Engine:
    """One rank's part in the run: its steps.

    `state` is what the rank holds, `recovery` what becomes of it when ranks die. `sparse_rate`
    gives, by step, a factor on the learning rate of all rows. It must be a pure function of the
    step and the same on all ranks: steps that are done again ask it again. Rows, redundancy and
    the logs of both lie on `device`; `allocate` gives their memory on the CPU. What slots are given
    and give is on the CPU; it is pinned where they are computed on another device, `slots_on`.
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
        sparse_rate: SparseRate | None = None,
        device: torch.device = CPU,
        slots_on: torch.device = CPU,
    ) -> None:
        allocate_shared = transport.allocate_shared
        if device.type != "cpu":
            allocate = ZerosOn(device)
            transport = staged = StagedTransport(transport, device)
            allocate_shared = staged.lend_on_device
        stores = ShardStores(make_store, tables, seed, allocate, allocate_shared, sparse_rate)
        self.state = EngineState(
            transport,
            stores,
            view,
            protection,
            make_dense,
            policy,
            hooks or Hooks(),
            clock,
            torch.empty if slots_on.type == "cpu" else rows_to_send,
        )
        self._in_flight = StepInFlight()
        self.recovery = Recovery(self.state, self._in_flight, durable)
        self._transport, self._sparse_rate = transport, sparse_rate
        self._gradients: dict[tuple[int, int], ReusableBuffer] = {}
        self._last_finished = clock()
        self._replica_check = ReplicaCheck(clock)
        self.asked = AskedBefore()
        """What slots have asked this rank for; whoever draws their batches may tell it of them."""
        self._over_at = -1

    @property
    def step(self) -> int:
        """The step to run next."""
        return self.state.step

    @property
    def committed(self) -> int:
        """How many steps cannot be taken back."""
        return self.state.committed

    @property
    def rank(self) -> int:
        """This rank's number, which never changes."""
        return self.state.rank

    @property
    def view(self) -> View:
        """Who has which role."""
        return self.state.view

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots that this rank runs."""
        return self.state.slots

    @property
    def over(self) -> bool:
        """Whether training ends before the step to run next. The same on all ranks.

        No slot has a part in that step, or somebody has asked for the end. It depends on the data
        and the script alone, so that no failure takes it back.
        """
        return self.step in (self._over_at, self.recovery.over_at, self.recovery.ends_at)

    def end_here(self) -> None:
        """Of all ranks, between steps: training ends before the step to run next."""
        self._over_at = self.step
        if self.state.dense is not None:
            self.state.dense.end_at(self.step)

    @property
    def confirmed(self) -> bool:
        """Whether a step that begins again has the rows that the last `lookup` returned."""
        return self._in_flight.confirmed

    @property
    def repairs_ahead(self) -> bool:
        """Whether `apply` has a use for `rows_soon`; the same on all ranks."""
        return self.state.repairs_ahead

    def enter(self, phase: str) -> None:
        """Name the phase that begins, for hooks and for the record of a failure."""
        self._in_flight.phase = phase
        self.state.hooks.phase(self.step, phase)

    def lookup(
        self,
        rows: Mapping[int, Sequence[Tensor]],
        computed: Collection[int] = (),
        apply_follows: bool = False,
    ) -> dict[int, list[Tensor]]:
        """Collective: current values of each slot's rows of each row space, float32 [U, dim].

        `rows[slot][space]` are unique row numbers, int64 [U], for every slot this rank runs (row r
        of a table is row `offset + r` of its space). Lost rows among them are recovered first, or
        the protection's stand-in gives values in their place. Values that came ahead with the last
        `apply` are returned as they came; `rows` must then be its `rows_ahead`, and an `apply`
        follow. `apply_follows`, the same on every rank, lets what nobody waits for come with that
        `apply`. A lookup without it only reads, in the phase that it finds: with a stand-in it
        restores nothing, which each step's must, and the stand-in remembers nothing of it. For
        slots that are `computed`, that `apply` will be given what was computed for this step before
        a failure: their values are not returned, and need not be there yet. None may be with a
        stand-in; whoever uses it must do so wherever the same step begins again and `confirmed` is
        true, since a step may be replayed on that (`ecrm/engine/step_replay.py`). Raises
        StepAborted after a failure.
        """
        flight = self._in_flight
        assert self.state.protection.stand_in is None or not computed
        with self.recovery.recovering():
            self._reshape_if_needed()
            if apply_follows:
                self.enter("lookup")
            came_ahead = flight.ahead is not None
            replays = apply_follows and flight.replayed is not None
            ready = flight.replayed if replays else flight.ahead
            flight.ahead = flight.replayed = flight.replay = None
            assert not replays or set(rows) == set(computed)
            if ready is None:
                self._check(rows, self.step)
                ready = self._ask(rows, computed, restores=apply_follows)
            flight.lookup, flight.recovered = ready, False
            late: Incoming = {}
            if self.view.rebuilding and ready.repair is not None:
                late = self._answer_repair(ready, at_once=not (came_ahead or apply_follows))
            flight.confirmed = came_ahead and not late
            return ready.rows(late, remember=apply_follows)

    def _check(self, rows: Mapping[int, Sequence[Tensor]], step: int) -> None:
        """End the run on all ranks where a row does not exist, before any is asked for."""
        if problem := stray_row(rows, self.state.spaces):
            self.recovery.refuse(f"step {step}, {problem}")

    def _ask(
        self, rows: Mapping[int, Sequence[Tensor]], computed: Collection[int], restores: bool
    ) -> Lookup:
        """Ask shards for rows, and begin a round of repair if anything is rebuilding.

        With a stand-in a round begins only where this `restores`.
        """
        state, budget = self.state, self._rebuild_rows
        stand_in = state.protection.stand_in
        # a shard that this makes whole is asked for its rows
        if self.view.rebuilding and stand_in is not None and restores:
            self._repair({}, budget)
        marks = self.asked.marks(self.step) if restores else {}
        lookup = Lookup.of(state.lookup_context(budget), rows, computed=computed, marks=marks)
        requests = self._transport.exchange(lookup.requests())
        if restores:
            self._check_asked(self.step, requests)
        lookup.receive_requests(requests)
        if self.view.rebuilding and stand_in is None and not state.protection.repairs_ahead:
            self._repair(lookup.shard_side.missing(), budget)
        lookup.receive_replies(StepReplies.of(self._transport.exchange(lookup.replies({}))))
        return lookup

    def _check_asked(self, step: int, requests: Mapping[int, Sequence[Received]]) -> None:
        """End the run on all ranks where a slot asks for something else than before a failure."""
        if problem := self.asked.problem(step, requests, self.state.layouts):
            self.recovery.refuse(problem, ChangedDataError)

    @property
    def _rebuild_rows(self) -> int:
        return self._in_flight.rebuild_rows(self.state.policy)

    def _answer_repair(self, lookup: Lookup, at_once: bool) -> Incoming:
        """At a commit: recover the rows that slots wait for; returns those sent to this rank's.

        Units of other rows come along and are decoded then. Where no slot waits they go with the
        step's results and cost no exchange, unless that must be `at_once`, since an `apply` may not
        come next.
        """
        self.enter("repair")
        repair = lookup.repair
        assert repair is not None
        self._note_repair(repair.report)
        if repair.urgent:
            repair.finish(self._transport.exchange(repair.answers()))
            replies = lookup.shard_side.late_replies()
            late, rest = exchange(self._transport, replies, attached=repair.rest())
            repair.finish(rest or {})
            return late
        if at_once:
            repair.finish(self._transport.exchange(repair.rest()))
        else:
            lookup.repair_goes_with_results = True
        return {}

    def gradient_buffer(self, slot: int, space: int, rows: int) -> Tensor:
        """Where a slot that this rank runs may sum the gradients of rows for the next `apply`.

        Float32 [rows, dim] of a space, holding anything: from there gradients reach ranks of this
        host uncopied. From `lookup` on it may be written; it is the memory of the last call's
        result for the slot and space.
        """
        if (slot, space) not in self._gradients:
            self._gradients = {
                key: buffer for key, buffer in self._gradients.items() if key[0] in self.slots
            }
            dim = self.state.spaces[space].dim
            self._gradients[slot, space] = ReusableBuffer(dim, self._transport.allocate_shared)
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
        slot_state: Mapping[int, Tensor] | None = None,
        skip_troubled: bool = False,
        over: Collection[int] = (),
        sit_out: Collection[int] = (),
        ends_at: int = -1,
    ) -> None:
        """Collective: finish the step begun by `lookup`.

        `row_gradients[slot][space]`, float32 [U, dim], are summed gradients of the rows looked up;
        `contributions[slot]`, float32 [P], goes to every dense replica. Commits when the interval
        is full, while anything is rebuilding, when `commit` says so, or when a rank asks to stop:
        then all ranks have `recovery.stopping` set. `rows_ahead`, given by every rank or by none,
        are the rows of the next `lookup`: they go along, with what a round of repair asks for, and
        save it two exchanges. `rows_soon`, with which any rank may go without, are likely those of
        the `lookup` after that: with `repairs_ahead`, those that are missing are recovered before
        slots have to wait for them. `notes[slot]`, uint8 [N], goes to the `log` of every dense
        holder: a note on this step, which is there once, however often the step is done.
        `troubles[slot]` is told to all ranks: the hook `troubled` gets those of all slots, on every
        rank, before anything is changed, and may end the run. With `skip_troubled`, the same on all
        ranks, `skipped` is called instead: the step changes no row, and dense replicas skip it.
        `slot_state[slot]`, uint8 [N], goes
        whole to every dense replica, for what cannot be summed. Notes and states are of slots that
        have a contribution, which one slot at least has. Slots that are `over` have no part in the
        next step; all of them make this step the last one, and commit it. Slots that `sit_out`
        change no row; their gradients hold anything. From one rank that has `ends_at` all learn
        before which later step training ends. Raises StepAborted after a failure, and UsageError,
        on every rank, where `sparse_rate` is no number of 0 or more.
        """
        state, flight, lookup = self.state, self._in_flight, self._in_flight.lookup
        factor(self._sparse_rate, self.step)  # where it is wrong, all ranks end alike
        with self.recovery.recovering():
            assert lookup is not None, "a step begins with lookup()"
            self.enter("update")
            flight.updating = True
            foresees = flight.confirmed and state.protection.foresees_repair
            flight.replay = StepReplay(self.step, lookup, self.view) if foresees else None
            ahead = self._lookup_ahead(rows_ahead, rows_soon)
            results = self._results(
                lookup,
                row_gradients,
                contributions,
                ahead,
                notes or {},
                slot_state or {},
                troubles or {},
                over,
                sit_out,
                ends_at,
            )
            came = self._exchange_results(lookup, results, skip_troubled)
            skips = skip_troubled and bool(came.troubles)
            flight.changed = True
            if skips:
                lookup.shard_side.pass_over(state.protection.keeps_deltas)
            else:
                lookup.slot_side.keep(row_gradients, self.step, sit_out)
                lookup.shard_side.update(came.gradients, state.protection.keeps_deltas, self.step)
            state.note_undo_bytes()
            committing = (
                commit
                or bool(came.stopping)
                or bool(self.view.rebuilding)
                or self._commit_is_due()
                or self.step + 1 in (self._over_at, self.recovery.ends_at)
            )
            self._exchange_redundancy(came, ahead, committing, skips)
            if committing and state.scrub is not None and not self.view.rebuilding:
                self.enter("scrub")
                state.scrub.check(self.view)
            state.step += 1
            self.asked.forget(self.committed)
            flight.updating = flight.changed = False
            if committing:
                flight.phase = "commit"
                state.hooks.phase(self.step - 1, "commit")
                self._agree_on_commit(compares=True)
                self.recovery.stopping = self.recovery.stopping or bool(came.stopping)
            put_right = committing and state.put_right
            if not (self.recovery.stopping or put_right or self.over):
                flight.ahead = ahead
            flight.replay = None
        self._step_finished()

    def _first_end(self, *ends: int) -> int:
        """The first step before which training ends, of those that this rank knows; -1 for none."""
        return min((end for end in (*ends, self.recovery.ends_at) if end >= 0), default=-1)

    def _lookup_ahead(
        self,
        rows_ahead: Mapping[int, Sequence[Tensor]] | None,
        rows_soon: Mapping[int, Sequence[Tensor]] | None,
    ) -> Lookup | None:
        """The next step's lookup, if its messages can go with this step's.

        The same on all ranks whether it is None.
        """
        can = not self.view.rebuilding or self.state.protection.repairs_ahead
        if rows_ahead is None or not can:
            return None
        self._check(rows_ahead, self.step + 1)
        self._check(rows_soon or {}, self.step + 2)
        context, marks = (
            self.state.lookup_context(self._rebuild_rows),
            self.asked.marks(self.step + 1),
        )
        return Lookup.of(context, rows_ahead, rows_soon, marks=marks)

    def _results(
        self,
        lookup: Lookup,
        row_gradients: Mapping[int, Sequence[Tensor]],
        contributions: Mapping[int, Tensor],
        ahead: Lookup | None,
        notes: Mapping[int, Tensor],
        slot_state: Mapping[int, Tensor],
        troubles: Mapping[int, str],
        over: Collection[int],
        sit_out: Collection[int],
        ends_at: int,
    ) -> dict[int, list[Part]]:
        """What this rank's slots send in a step's first exchange.

        Row gradients to shards, slices, notes and states to dense holders, and the next lookup's
        requests.
        """
        holders = SlicedSum(self.view.dense)
        outgoing = lookup.slot_side.gradients(row_gradients, sit_out)
        for slot, contribution in sorted(contributions.items()):
            for holder, part in holders.slices(contribution).items():
                outgoing.setdefault(holder, []).extend(((DENSE, slot), part))
                if slot in notes:
                    outgoing[holder].extend(((NOTE, slot), notes[slot]))
                if slot in slot_state:
                    outgoing[holder].extend(((SLOT_STATE, slot), slot_state[slot]))
        for rank, requests in ahead.requests().items() if ahead is not None else ():
            outgoing.setdefault(rank, []).extend(requests)
        for rank in self.view.live if self.state.hooks.asks() else ():
            outgoing.setdefault(rank, []).extend(((STOP,), torch.empty(0)))
        for slot in over:
            for rank in self.view.live:
                outgoing.setdefault(rank, []).extend(((OVER, slot), torch.empty(0)))
        if (ends := self._first_end(ends_at)) >= 0:  # whoever said it may be dead by now
            for rank in self.view.live:
                outgoing.setdefault(rank, []).extend(((ENDS, ends), torch.empty(0)))
        for slot, trouble in troubles.items():
            said = torch.tensor(list(trouble.encode()), dtype=torch.uint8)
            for rank in self.view.live:
                outgoing.setdefault(rank, []).extend(((TROUBLE, slot), said))
        return outgoing

    def _exchange_results(self, lookup: Lookup, results: Outgoing, skips: bool) -> StepResults:
        """A step's first exchange: what slots have computed, and the rest of a round of repair.

        All ranks know of troubles afterwards; `skips` says whether they skip the step for them.
        """
        repair = lookup.repair if lookup.repair_goes_with_results else None
        attached = None if repair is None else repair.rest()
        received, rest = exchange(self._transport, results, attached)
        came = StepResults.of(received)
        self._over_at = self.step + 1 if len(came.over) == len(self.view.slots) else -1
        if came.ends:
            self.recovery.ends_at = self._first_end(*came.ends)
            if self.state.dense is not None:
                self.state.dense.end_at(self.recovery.ends_at)
        if came.troubles:
            if not self._transport.agree(True):
                raise PeerFailure("a rank died while others told of trouble")
            hooks = self.state.hooks
            tell = hooks.skipped if skips else hooks.troubled
            tell(self.step, dict(sorted(came.troubles.items())))
        if repair is not None:  # before the rows that it was read from are updated
            repair.finish(rest or {})
        return came

    def _exchange_redundancy(
        self, came: StepResults, ahead: Lookup | None, committing: bool, skips: bool
    ) -> None:
        """A step's second exchange: redundancy if `committing`, next rows, slices of the dense sum.

        The dense replica then takes its step, or `skips` it.
        """
        state = self.state
        attached: dict[int, list[Part]] = {}
        if ahead is not None:
            self._check_asked(self.step + 1, came.requests)
            ahead.receive_requests(came.requests)
            attached = ahead.replies(came.soon)
        if state.dense is not None:
            total = SlicedSum.reduce(came.dense)
            for holder in self.view.dense:
                attached.setdefault(holder, []).extend(((DENSE,), total))
        # with a repair some of it comes late
        held = ahead.shard_side if ahead is not None and ahead.repair is None else None
        collected = self._protect(held, attached) if committing else None
        self.enter("dense")
        if collected is None:
            collected = self._transport.exchange(attached)
        replies = StepReplies.of(collected)
        if ahead is not None:
            ahead.receive_replies(replies)
        if committing and ahead is not None and held is not None:
            state.protection.retain(ahead.slot_side, replies.replies)
        if state.dense is not None:
            if skips:
                state.dense.skip(came.states)
            else:
                total = SlicedSum(self.view.dense).assemble(replies.dense)
                state.dense.apply(total, came.states)
            state.log.add(self.step, came.notes)

    def commit(self) -> None:
        """Collective, between steps: commit what is not yet, and compare all dense replicas.

        Whatever is saved comes after a call of this. Raises StepAborted after a failure, and
        ReplicasDiffer on every rank where replicas differ.
        """
        with self.recovery.recovering():
            self._compare_replicas()
            if self.committed < self.step:
                self._protect()
                self._agree_on_commit()

    def _compare_replicas(self) -> None:
        """Collective: raise ReplicasDiffer on every rank unless all dense replicas are the same."""
        if len(self.view.dense) > 1:
            dense = self.state.dense
            entries = None if dense is None else dense.entries
            if problem := compare_replicas(self._transport, entries, self.step):
                self.recovery.refuse(problem, ReplicasDiffer)

    def seal(self) -> None:
        """Collective, between steps: agree that all ranks have come here, one more `state.seals`.

        Raises StepAborted after a failure. A rank that learned of it in that recovery counts it,
        too, and then no other begins again with what came before.
        """
        with self.recovery.recovering():
            if not self._transport.agree(True):
                raise PeerFailure("a rank died")
            self.state.seals += 1

    def _protect(
        self, ahead: ShardRequests | None = None, attached: Outgoing | None = None
    ) -> Incoming | None:
        """Bring redundancy up to date.

        Returns what others had `attached`, None where nothing was exchanged.
        """
        self.enter("parity")
        state = self.state
        deltas = {key: hosted.deltas_since_commit() for key, hosted in state.hosted.items()}
        rounds = state.protection.protect(deltas, self.view, ahead)
        collected = exchange_rounds(self._transport, rounds, attached)
        state.note_undo_bytes()
        return collected

    def heed_stop(self) -> None:
        """Collective, between steps: raise StopAgreed on every rank if any asks to stop.

        Raises StepAborted after a failure.
        """
        recovery = self.recovery
        with recovery.recovering():
            asks = recovery.stopping or self.state.hooks.asks()
            recovery.stopping = not self._transport.agree(not asks)
        if recovery.stopping:
            raise StopAgreed

    def _commit_is_due(self) -> bool:
        return self.step + 1 - self.committed >= self.state.policy.commit_interval

    def _agree_on_commit(self, compares: bool = False) -> None:
        """Collective: accept a commit; `compares`: with a word of the dense replica's digest."""
        state = self.state
        present = None if state.dense is None else state.present_dense
        state.protection.prepare(self.step, present)
        scrub = state.scrub
        word = None
        if compares and state.dense is not None and len(self.view.dense) > 1:
            word = self._replica_check.word_if_due(state.dense, self.step)
        clean, alike = self._transport.agree_alike(scrub is None or scrub.clean, word)
        if not alike:
            self._compare_replicas()
            raise AssertionError("dense replicas differ by their digests, and by no entry")
        if not clean:
            assert scrub is not None
            scrub.tell()
            if not self._transport.agree(True):
                raise AssertionError("a live rank refused the commit")
        state.accept_commit()
        state.hooks.committed()

    def _step_finished(self) -> None:
        state, now = self.state, self.state.clock()
        for failure in state.failures.step_finished(self._last_finished, now):
            state.hooks.event(
                {
                    "event": "resumed",
                    "ranks": list(failure.ranks),
                    "stall_seconds": failure.stall_seconds,
                }
            )
        self._replica_check.stepped(now - self._last_finished)
        self._last_finished = now

    def _repair(self, wanted: dict[ShardSpace, Tensor], budget: int) -> None:
        """One round of repair; what it restores and learns counts from the next commit on."""
        self.enter("repair")
        self._note_repair(self.state.protection.repair(wanted, budget, self.view))

    def _note_repair(self, report: RepairReport) -> None:
        self.state.repaired, self.state.rebuild_left = report, report.left

    def _reshape_if_needed(self) -> None:
        """At a commit, nothing rebuilding, stripe members not apart: lay everything out anew."""
        state = self.state
        due = (
            self.view.epoch != state.reshape_considered
            and not self.view.rebuilding
            and self.step == self.committed
        )
        if not due or not state.policy.reshape:
            return
        state.reshape_considered = self.view.epoch
        plan = plan_reshape(self.view, state.protection.shape)
        if plan is None:
            return
        began = state.clock()
        self._scrub_once_round()  # parity is encoded anew: what is wrong by then is never found
        self.enter("reshape")
        state.reshape = Reshape(*plan, state.context, state.protection, state.stores, began)
        state.reshape.run()
        self._agree_on_commit()
        self._in_flight.ahead = self._in_flight.replayed = None

    def rebuild_all(self, in_time: Callable[[], bool] | None = None) -> bool:
        """Collective, at a commit: recover all missing rows. Returns whether all are back.

        With `in_time` it ends early once a rank is not; without it raises StopAgreed where one asks
        to stop. Raises StepAborted after a failure.
        """
        # what they wait for comes now
        self._in_flight.ahead = self._in_flight.replayed = None
        with self.recovery.recovering():
            while self.view.rebuilding:
                self._repair({}, max(1 << 16, self.state.policy.rebuild_rows_per_step))
                self._agree_on_commit()
                if in_time is None:
                    self.heed_stop()
                elif not self._transport.agree(in_time()):
                    break
        return not self.view.rebuilding

    def scrub_all(self) -> None:
        """Collective, at a commit, nothing rebuilding: scrub once round, if at all.

        Raises StepAborted after a failure.
        """
        with self.recovery.recovering():
            self._scrub_once_round()

    def _scrub_once_round(self) -> None:
        scrub = self.state.scrub
        if scrub is None:
            return
        enough = scrub.report.rows_checked + scrub.rows_per_pass
        while scrub.report.rows_checked < enough:
            self.enter("scrub")
            scrub.check(self.view, at_least=1 << 16)
            self._agree_on_commit()

    def verify_parity(self) -> VerifyReport:
        """Collective, at a commit, nothing rebuilding: compare all redundancy with the rows.

        Returns totals over all ranks.
        """
        with self.recovery.recovering():
            mine = self.state.protection.verify(self.view)
            shared = self._transport.share([torch.tensor([mine.stripes, mine.mismatches])])
            of_all = torch.stack([tensors(parts)[0] for parts in shared.values()])
            return VerifyReport(*of_all.sum(0).tolist())

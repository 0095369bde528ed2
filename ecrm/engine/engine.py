"""The engine: a bulk-synchronous step over shards and slots, on a state surviving deaths.

Only the engine joins transport, storage, protection and views. A training loop drives the engine:

    while engine.step < steps:
        try:
            rows = engine.lookup(requests_of(engine.step, engine.slots), apply_follows=True)
            ...                                   # forward and backward, local to the slot
            engine.apply(StepInput(row_gradients, dense_contributions))
        except StepAborted:
            continue                              # engine.step and engine.slots may have changed

A step has two exchanges and an agreement. The first exchange carries the results of slots, the
requests for the next step, and the rest of a round of repair. The second carries the updates of
redundancy, the next step's rows, and the slices of the dense sum.

# Duties of the caller

- One thread per rank makes all calls.
- Every live rank calls the same collective methods in the same order, from recovery to recovery. A
  rank without slots passes empty mappings.
- The batch of a slot depends on step and slot alone, and `sparse_rate` on the step alone: a step
  done again asks for the batch and the rate again. A changed batch ends the run, if the hook
  `changed` finds the change.
- Row numbers in `rows[slot][space]` are unique. Only the range of row numbers is checked.
- At least one slot has a contribution in every step.
- Row numbers, for `lookup` or as `rows_ahead`, stay unchanged until the `apply` of the same step
  returns or raises. Gradients and contributions stay unchanged until `apply` returns or raises.
- Calls on the transport outside the engine stand inside `recovery.recovering()`.
- After an error the caller acts as listed under Errors, and never just calls again.

# Order of calls

- Before the first step: `recovery.resume`, to go on from the durable tier; on a rank that has
  joined a run under way: `recovery.join`, and none of the calls made at the start.
- Per step: `lookup` with `apply_follows`, the passes of the slots, `apply`. After an `apply` with
  `rows_ahead` the next `lookup` asks for exactly the rows in `rows_ahead`, and an `apply` follows.
- Between two steps, in any number: `check_stop`, `commit`, and, if the last `apply` had no
  `rows_ahead`, `lookup` without `apply_follows`. `end_here` ends training before the next step.
- Between two steps, at a commit: `rebuild_all`, dropping rows that came ahead. Then, with nothing
  rebuilding, `scrub_all` and `verify_parity`: a correction would not reach rows that came ahead.
- After StepAborted: the step `engine.step` for `engine.slots`, from `lookup` on.
- After the last step: `commit`, `rebuild_all`, then `scrub_all` and `verify_parity` if wanted.

With `recovery.stopping` true after an `apply`, the step is committed and all ranks are to stop.

# Errors

- `StepAborted`: a recovery is through. Rows and dense replica are as of a commit, or as of a
  checkpoint after a rollback. Rows looked up are dropped. The view may be new, and lost rows may
  still be missing. Some ranks may have completed the call, and the step may be committed:
  `engine.step` names the step to run next.
- `StopRequested`: every live rank raises the error before the same step. Nothing is undone.
  Finished rounds of `rebuild_all` are committed, and `recovery.stopping` stays true.
- `StrayRow`, `ChangedDataError`, `ReplicasDiffer`, and `ScriptFailed` with a `speaker`: every live
  rank raises the same error. The step in flight is not undone, and the run ends.
- `ScriptFailed` without a `speaker`: this rank is to leave, by the inquest. The survivors recover.
- `Unrecoverable`, or an error of the durable tier: all survivors raise the error, the rows may be
  of no commit, and the run ends. `LostTouch` may come on some ranks only, if no call gets through.
- `UsageError` for `sparse_rate`: every rank raises the error in `apply`, before any message. The
  step has changed no row, and the run ends.
- An `EcrmError` of the hook `troubled`: every rank raises the error before the step changes a row.
- Any different error: this rank must end, since an update may lack a delta in the log. The
  survivors recover as from any death.

No method of `Engine` raises `PeerFailure`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from ecrm.base.allocate import CPU, Allocate, ReusableBuffer, ZerosOn, lazy_zeros
from ecrm.base.errors import ChangedDataError, ReplicasDiffer
from ecrm.device.pinned import rows_to_send
from ecrm.engine import events
from ecrm.engine.dense import DenseReplica, SlicedSum
from ecrm.engine.hooks import EnginePolicy, Hooks, StopRequested
from ecrm.engine.in_flight import StepInFlight
from ecrm.engine.lookup import Bags, Lookup, stray_row
from ecrm.engine.recovery import Recovery
from ecrm.engine.replica_check import ReplicaCheck, compare_replicas
from ecrm.engine.reshape import Reshape
from ecrm.engine.rollback import Durable
from ecrm.engine.shard_stores import ShardStores
from ecrm.engine.state import EngineState
from ecrm.engine.step_input import StepInput
from ecrm.engine.step_replay import StepReplay
from ecrm.placement.sparse_optimizer import SparseOptimizer, SparseRate, factor
from ecrm.placement.tables import Table
from ecrm.placement.view import View
from ecrm.protection.base import Protection, RepairReport, VerifyReport
from ecrm.protection.routing import (
    DENSE,
    FoundRows,
    ShardRequests,
    StepReplies,
    StepResults,
)
from ecrm.storage.hosted import ShardSpace
from ecrm.transport.base import Transport
from ecrm.transport.message import Received
from ecrm.transport.outbox import Outbox
from ecrm.transport.piggyback import Incoming, Outgoing, exchange, exchange_rounds
from ecrm.transport.staged import StagedTransport


class Engine:
    """The steps of one rank in the run.

    `state` holds the rank's data, `recovery` restores the data after deaths. `optimizer` is for
    tables without their own. `sparse_rate` gives, by step, a factor on the learning rate of all
    rows, as a pure function of the step, the same on all ranks: steps done again ask for the factor
    again. Rows, redundancy and logs lie on `device`; on the CPU `allocate` gives the memory of rows
    and redundancy. Tensors given to slots, or by slots, are on the CPU; rows for slots are pinned
    unless `slots_on` is the CPU. `whole_tables`: whether small tables lie whole on shards.
    With a `wire_dtype` of bfloat16, rows come rounded to bfloat16, and the caller rounds gradients
    (`ecrm/protection/wire_dtype.py`).
    """

    def __init__(
        self,
        transport: Transport,
        tables: Sequence[Table],
        view: View,
        protection: Protection,
        optimizer: SparseOptimizer,
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
        whole_tables: bool = False,
        wire_dtype: torch.dtype = torch.float32,
    ) -> None:
        allocate_shared = transport.allocate_shared
        if device.type != "cpu":
            allocate = ZerosOn(device)
            transport = staged = StagedTransport(transport, device)
            allocate_shared = staged.lend_on_device
        stores = ShardStores(
            optimizer, tables, seed, allocate, allocate_shared, sparse_rate, whole_tables
        )
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
            wire_dtype,
        )
        self._in_flight = StepInFlight()
        self.recovery = Recovery(self.state, self._in_flight, durable)
        self._transport, self._sparse_rate = transport, sparse_rate
        self._gradients: dict[tuple[int, int], ReusableBuffer] = {}
        self._last_finished = clock()
        self._replica_check = ReplicaCheck(clock)
        self._over_at = -1

    @property
    def step(self) -> int:
        """The step to run next."""
        return self.state.step

    @property
    def committed(self) -> int:
        """Number of steps not to be taken back."""
        return self.state.committed

    @property
    def rank(self) -> int:
        """The number of this rank; never changes."""
        return self.state.rank

    @property
    def view(self) -> View:
        """The roles of all ranks."""
        return self.state.view

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype that rows and gradients of rows are rounded to."""
        return self.state.wire_dtype

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots of this rank."""
        return self.state.slots

    @property
    def over(self) -> bool:
        """Whether training ends before the step to run next. The same on all ranks.

        No slot has a part in the next step, or a rank has asked for the end. The end depends on the
        data and the script alone, so no failure takes the end back.
        """
        return self.step in (self._over_at, self.recovery.over_at, self.recovery.ends_at)

    def end_here(self) -> None:
        """End training before the step to run next. Called on all ranks, between steps."""
        self._over_at = self.step
        if self.state.dense is not None:
            self.state.dense.end_at(self.step)

    @property
    def confirmed(self) -> bool:
        """Whether a step done again starts from the same rows as the last `lookup` returned."""
        return self._in_flight.confirmed

    @property
    def repairs_ahead(self) -> bool:
        """Whether `apply` has a use for `rows_soon`; the same on all ranks."""
        return self.state.repairs_ahead

    def enter(self, phase: str) -> None:
        """Name the beginning phase, for hooks and for the record of a failure."""
        self._in_flight.phase = phase
        self.state.hooks.phase(self.step, phase)

    def lookup(
        self,
        rows: Mapping[int, Sequence[Tensor]],
        computed: Collection[int] = (),
        apply_follows: bool = False,
    ) -> dict[int, list[Tensor]]:
        """Collective: `find`, with the values copied to one place, float32 [U, dim]."""
        found = self.find(rows, computed, apply_follows)
        return {slot: [each.copied() for each in of_slot] for slot, of_slot in found.items()}

    def find(
        self,
        rows: Mapping[int, Sequence[Tensor]],
        computed: Collection[int] = (),
        apply_follows: bool = False,
        bags: Bags = MappingProxyType({}),
    ) -> dict[int, list[FoundRows]]:
        """Collective: current values of every slot's rows of every row space, where they lie.

        `rows[slot][space]` are unique row numbers, int64 [U], for every slot of this rank (row r
        of a table is row `offset + r` of the row space). Lost rows among `rows` are recovered
        first, or the protection's stand-in gives values instead. If values came ahead with the last
        `apply`, `rows` must equal `rows_ahead` of the same `apply`, and an `apply` must follow; the
        values are returned as received. The values may be read until the next collective call.
        `apply_follows`, the same on every rank, lets rows without
        a waiting slot come with the `apply`. A lookup without `apply_follows` only reads, in the
        phase at hand: with a stand-in the lookup restores nothing, as the lookup of a step must,
        and the stand-in remembers no row of the lookup. For `computed` slots, `apply` will be given
        results computed for this step before a failure: the values are not returned, and may still
        be missing. With a stand-in no slot may be `computed`. A caller using `computed` must always
        do so if the same step begins again and `confirmed` is true: the step may be replayed
        (`ecrm/engine/step_replay.py`). `bags[slot][space]` are the bags of the rows, ascending
        then, if sums of bags are the only use of the rows: shards may sum the bags, and the values
        then have sums in place of rows. Raises StepAborted after a failure; on every rank StrayRow
        for a row outside the row space, ChangedDataError for other rows than before a failure.
        """
        flight = self._in_flight
        assert self.state.protection.stand_in is None or not computed
        with self.recovery.recovering():
            self._reshape_if_needed()
            # a lookup that only reads leaves the caller's phase, such as an evaluation
            if apply_follows:
                self.enter("lookup")
            came_ahead = flight.ahead is not None
            replays = apply_follows and flight.replayed is not None
            ready = flight.replayed if replays else flight.ahead
            flight.ahead = flight.replayed = flight.replay = None
            assert not replays or set(rows) == set(computed)
            # rows that came ahead, or of a replay, were checked and asked for before
            if ready is None:
                self._check(rows, self.step)
                ready = self._ask(rows, computed, restores=apply_follows, bags=bags)
            flight.lookup, flight.recovered = ready, False
            late: Incoming = {}
            # a round begun with the requests is answered here: at a commit, before any update
            if self.view.rebuilding and ready.repair is not None:
                late = self._answer_repair(ready, at_once=not (came_ahead or apply_follows))
            flight.confirmed = came_ahead and not late
            return ready.rows(late, remember=apply_follows)

    def _check(self, rows: Mapping[int, Sequence[Tensor]], step: int) -> None:
        """End the run on all ranks if a row does not exist, before asking for any row."""
        if problem := stray_row(rows, self.state.spaces):
            self.recovery.refuse(f"step {step}, {problem}")

    def _ask(
        self,
        rows: Mapping[int, Sequence[Tensor]],
        computed: Collection[int],
        restores: bool,
        bags: Bags,
    ) -> Lookup:
        """Ask shards for rows, and begin a round of repair if anything is rebuilding.

        With a stand-in a round begins only if the lookup `restores`.
        """
        state, budget = self.state, self._rebuild_rows(self.step)
        stand_in = state.protection.stand_in
        # a shard made whole by the round answers for itself in the same step
        if self.view.rebuilding and stand_in is not None and restores:
            self._repair({}, budget)
        marks = state.hooks.marks(self.step) if restores else {}
        context = state.lookup_context(budget)
        lookup = Lookup.of(context, rows, computed=computed, marks=marks, bags=bags)
        requests = self._transport.exchange(lookup.requests())
        # a lookup that only reads belongs to no step, and is never done again
        if restores:
            self._check_asked(self.step, requests)
        lookup.receive_requests(requests)
        # shards cannot answer before the missing rows among the requests are back
        if self.view.rebuilding and stand_in is None and not state.protection.repairs_ahead:
            self._repair(lookup.shard_side.missing(), budget)
        lookup.receive_replies(StepReplies.of(self._transport.exchange(lookup.replies({}))))
        return lookup

    def _check_asked(self, step: int, requests: Mapping[int, Sequence[Received]]) -> None:
        """End the run on all ranks if a slot asks for different rows than before a failure."""
        if problem := self.state.hooks.changed(step, requests):
            self.recovery.refuse(problem, ChangedDataError)

    def _rebuild_rows(self, step: int) -> int:
        return self._in_flight.rebuild_rows(self.state.pace, step)

    def _answer_repair(self, lookup: Lookup, at_once: bool) -> Incoming:
        """At a commit: recover the rows awaited by slots; return the replies to slots of this rank.

        Units of further rows come along and are decoded then. If no slot waits, the units go with
        the step's results and cost no exchange, unless sent `at_once`, for a lookup perhaps without
        an `apply`.
        """
        self.enter("repair")
        repair = lookup.repair
        assert repair is not None
        self._note_repair(repair.report)
        # slots wait for lost rows: the rows go first, and further units with the replies
        if repair.urgent:
            repair.finish(self._transport.exchange(repair.answers()))
            replies = lookup.shard_side.late_replies()
            late, rest = exchange(self._transport, replies, attached=repair.rest())
            repair.finish(rest or {})
            return late
        # perhaps no results follow that could carry the units
        if at_once:
            repair.finish(self._transport.exchange(repair.rest()))
        else:
            lookup.repair_goes_with_results = True
        return {}

    def gradient_buffer(self, slot: int, space: int, rows: int) -> Tensor:
        """Memory for a slot of this rank to sum the gradients of rows in, for the next `apply`.

        Float32 [rows, dim] of a space, holding anything; ranks of this host get gradients in the
        buffer without a copy. May be written from `lookup` on; shares memory with the last call's
        result for the slot and space.
        """
        if (slot, space) not in self._gradients:
            self._gradients = {
                key: buffer for key, buffer in self._gradients.items() if key[0] in self.slots
            }
            dim = self.state.spaces[space].dim
            self._gradients[slot, space] = ReusableBuffer(dim, self._transport.allocate_shared)
        return self._gradients[slot, space].of(rows)

    @property
    def may_sum_bags(self) -> bool:
        """Whether `find` and `apply` have a use for bags; the same on all ranks."""
        return self.state.may_sum_bags

    def sums_elsewhere(self, slot: int, space: int) -> bool:
        """Whether shards sum bags of a slot's rows, and take gradients of bags in `apply`."""
        lookup = self._in_flight.lookup
        return lookup is not None and lookup.slot_side.sums_elsewhere(slot, space)

    def apply(self, given: StepInput) -> None:
        """Collective: finish the step begun by `lookup`.

        Commits if the interval is full, if anything is rebuilding, before the end of training, with
        `given.commit`, or if a rank asks to stop: all ranks then have `recovery.stopping` set.
        Raises StepAborted after a failure; UsageError on every rank unless `sparse_rate` is a
        number of 0 or more; on every rank StrayRow, ChangedDataError or ReplicasDiffer for wrong
        rows or replicas.
        """
        state, flight, lookup = self.state, self._in_flight, self._in_flight.lookup
        # before any message: with a wrong rate all ranks end alike, and no rank is left waiting
        factor(self._sparse_rate, self.step)
        with self.recovery.recovering():
            assert lookup is not None, "a step begins with lookup()"
            self.enter("update")
            flight.updating = True
            # Rows that came in this step may have reached some slots only. A replay needs rows
            # confirmed by an agreement, and hosts of units able to begin without requests.
            foresees = flight.confirmed and state.protection.foresees_repair
            flight.replay = StepReplay(self.step, lookup, self.view) if foresees else None
            ahead = self._lookup_ahead(given.rows_ahead, given.rows_soon, given.bags_ahead)
            ends_at = self._first_end(given.ends_at)
            results = given.messages(
                self.view,
                lookup,
                ahead,
                state.hooks.asks(),
                ends_at,
                state.asks_for_newcomers,
            )
            came = self._exchange_results(lookup, results, given.skip_troubled)
            skips = given.skip_troubled and bool(came.troubles)
            # set before the first update: a death in the middle must count rows as changed
            flight.changed = True
            if skips:
                # protections count on a delta of every row asked for: log an empty delta
                lookup.shard_side.pass_over(state.protection.keeps_deltas)
            else:
                # a shard away cannot update now: the stand-in keeps the gradients for later
                lookup.slot_side.keep(given.row_gradients, self.step, given.sit_out)
                lookup.shard_side.update(
                    came.gradients, state.protection.keeps_deltas, self.step, came.of_bags
                )
            state.note_undo_bytes()
            committing = (
                given.commit
                # a stop must lose no step
                or bool(came.stopping)
                # ranks join at a commit
                or bool(came.joins)
                # units must be of the same step when read for the rebuild
                or bool(self.view.rebuilding)
                or self._commit_is_due()
                # no later step would commit the last step
                or self.step + 1 in (self._over_at, self.recovery.ends_at)
            )
            self._exchange_redundancy(came, ahead, committing, skips)
            # after `protect` alone are rows and parity of the same step; a rebuild lacks units
            if committing and state.scrub is not None and not self.view.rebuilding:
                self.enter("scrub")
                state.scrub.check(self.view)
            state.step += 1
            flight.updating = flight.changed = False
            # without a commit no agreement is due: a failure takes back all steps of the interval
            if committing:
                flight.phase = "commit"
                state.hooks.phase(self.step - 1, "commit")
                self._agree_on_commit(compares=True)
                # only after the agreement do all ranks know of the request to stop
                self.recovery.stopping = self.recovery.stopping or bool(came.stopping)
                # a run about to end needs no further rank
                ends = given.commit or self.recovery.stopping or self.over
                if came.joins and not ends:
                    self._step_finished()
                    self.recovery.admit()
            put_right = committing and state.put_right
            # After a stop or the end no lookup follows. A correction by scrubbing makes rows that
            # came ahead wrong: the next lookup asks anew.
            if not (self.recovery.stopping or put_right or self.over):
                flight.ahead = ahead
            flight.replay = None
        self._step_finished()

    def _first_end(self, *ends: int) -> int:
        """The first of all steps known to end training, of `ends` and `recovery`; -1 for no end."""
        return min((end for end in (*ends, self.recovery.ends_at) if end >= 0), default=-1)

    def _lookup_ahead(
        self,
        rows_ahead: Mapping[int, Sequence[Tensor]] | None,
        rows_soon: Mapping[int, Sequence[Tensor]] | None,
        bags: Bags,
    ) -> Lookup | None:
        """The next step's lookup, if the requests can go with this step's messages.

        `None` on all ranks or on no rank.
        """
        can = not self.view.rebuilding or self.state.protection.repairs_ahead
        # without repair ahead, rows still missing cannot come with this step: slots ask afterwards
        if rows_ahead is None or not can:
            return None
        # before any message: no shard is ever asked for a row that does not exist
        self._check(rows_ahead, self.step + 1)
        self._check(rows_soon or {}, self.step + 2)
        context = self.state.lookup_context(self._rebuild_rows(self.step + 1))
        marks = self.state.hooks.marks(self.step + 1)
        return Lookup.of(context, rows_ahead, rows_soon, marks=marks, bags=bags)

    def _exchange_results(self, lookup: Lookup, results: Outgoing, skips: bool) -> StepResults:
        """A step's first exchange: the results of slots, and the rest of a round of repair.

        All ranks know of troubles afterwards; `skips`: whether the ranks skip the step in trouble.
        """
        # a repair finished within the lookup has no rest left: the exchange carries results alone
        repair = lookup.repair if lookup.repair_goes_with_results else None
        attached = None if repair is None else repair.rest()
        received, rest = exchange(self._transport, results, attached)
        came = StepResults.of(received)
        # one slot with data is enough for a further step: all slots must be over
        self._over_at = self.step + 1 if len(came.over) == len(self.view.slots) else -1
        # ranks may ask for different ends: all take the first
        if came.ends:
            self.recovery.ends_at = self._first_end(*came.ends)
            # the end must outlive deaths and restarts: the dense state carries the end
            if self.state.dense is not None:
                self.state.dense.end_at(self.recovery.ends_at)
        if came.troubles:
            # A rank may die while sending, and some ranks then miss the troubles. The hooks may end
            # the run: call the hooks only after an agreement.
            self._transport.barrier("others told of trouble")
            hooks = self.state.hooks
            tell = hooks.skipped if skips else hooks.troubled
            tell(self.step, dict(sorted(came.troubles.items())))
        # before any update: units are of the commit, and no row may be missing in an update
        if repair is not None:
            repair.finish(rest or {})
        return came

    def _exchange_redundancy(
        self, came: StepResults, ahead: Lookup | None, committing: bool, skips: bool
    ) -> None:
        """A step's second exchange: redundancy if `committing`, next rows, slices of the dense sum.

        The dense replica then takes the step, or `skips` the step.
        """
        state = self.state
        attached = Outbox()
        if ahead is not None:
            # a changed batch would change the model unnoticed: end the run before any reply
            self._check_asked(self.step + 1, came.requests)
            ahead.receive_requests(came.requests)
            attached = ahead.replies(came.soon)
        # each holder sums a slice, and sends the sum to all holders
        if state.dense is not None:
            total = SlicedSum.reduce(came.dense)
            for holder in self.view.dense:
                attached.add(holder, (DENSE,), total)
        # with a repair some replies come late: a trainer's rows do not count as copies
        held = ahead.shard_side if ahead is not None and ahead.repair is None else None
        # redundancy is of the commit: between two commits the log of deltas is enough to go back
        collected = self._protect(held, attached) if committing else None
        self.enter("dense")
        # no redundancy was exchanged, so no message has carried the rows and slices yet
        if collected is None:
            collected = self._transport.exchange(attached)
        replies = StepReplies.of(collected)
        # the values wait for the lookup of the next step
        if ahead is not None:
            ahead.receive_replies(replies)
        # `protect` has sent the tails of records; only with the rows does a trainer hold copies
        if committing and ahead is not None and held is not None:
            state.protection.retain(ahead.slot_side, replies.replies)
        if state.dense is not None:
            # a skipped step still counts as a step of the replica, without a change of parameters
            if skips:
                state.dense.skip(came.states)
            else:
                total = SlicedSum(self.view.dense).assemble(replies.dense)
                state.dense.apply(total, came.states)
            state.log.add(self.step, came.notes)

    def commit(self) -> None:
        """Collective, between steps: commit all finished steps, and compare all dense replicas.

        Anything saved is saved after a `commit`. Raises StepAborted after a failure, and
        ReplicasDiffer on every rank if replicas differ.
        """
        with self.recovery.recovering():
            self._compare_replicas()
            # without a new step, redundancy is up to date
            if self.committed < self.step:
                self._protect()
                self._agree_on_commit()

    def _compare_replicas(self) -> None:
        """Collective: raise ReplicasDiffer on every rank unless all dense replicas are the same."""
        # a single replica cannot differ
        if len(self.view.dense) > 1:
            dense = self.state.dense
            entries = None if dense is None else dense.entries
            if problem := compare_replicas(self._transport, entries, self.step):
                self.recovery.refuse(problem, ReplicasDiffer)

    def _protect(
        self, ahead: ShardRequests | None = None, attached: Outgoing | None = None
    ) -> Incoming | None:
        """Bring redundancy up to date.

        Returns the messages `attached` for this rank, `None` without an exchange.
        """
        self.enter("parity")
        state = self.state
        deltas = {key: hosted.deltas_since_commit() for key, hosted in state.hosted.items()}
        rounds = state.protection.protect(deltas, self.view, ahead)
        collected = exchange_rounds(self._transport, rounds, attached)
        state.note_undo_bytes()
        return collected

    def check_stop(self) -> None:
        """Collective, between steps: raise StopRequested on every rank if any rank asks to stop.

        Raises StepAborted after a failure.
        """
        recovery = self.recovery
        with recovery.recovering():
            asks = recovery.stopping or self.state.hooks.asks()
            recovery.stopping = not self._transport.agree(not asks)
        # outside of `recovering`: the agreement is through, and nothing is undone
        if recovery.stopping:
            raise StopRequested

    def _commit_is_due(self) -> bool:
        return self.step + 1 - self.committed >= self.state.policy.commit_interval

    def _agree_on_commit(self, compares: bool = False) -> None:
        """Collective: accept a commit; `compares`: with a word of the dense replica's digest."""
        state = self.state
        present = None if state.dense is None else state.present_dense
        # before the agreement: a rank may die right after, and files must hold the commit by then
        state.protection.prepare(self.step, present)
        scrub = state.scrub
        word = None
        # the word travels in the agreement itself: comparing replicas costs no message
        if compares and state.dense is not None and len(self.view.dense) > 1:
            word = self._replica_check.word_if_due(state.dense, self.step)
        clean, alike = self._transport.agree_alike(scrub is None or scrub.clean, word)
        # words differ without naming an entry: compare whole replicas for the error
        if not alike:
            self._compare_replicas()
            raise AssertionError("dense replicas differ by their digests, and by no entry")
        # Corrections must be the same on all ranks. A rank may die while telling, so the commit
        # waits for a second agreement.
        if not clean:
            assert scrub is not None
            scrub.tell()
            self._transport.barrier("corrections were told")
        state.accept_commit()
        state.hooks.committed()

    def _step_finished(self) -> None:
        state, now = self.state, self.state.clock()
        resumed = state.failures.step_finished(self._last_finished, now)
        mine = set(state.view.shards_of(self.rank)).intersection(state.view.rebuilding)
        # a step with a recovery tells nothing of the pace, nor does the rebuilding of others
        if resumed or (state.view.rebuilding and not mine):
            state.pace.interrupted()
        elif mine:
            state.pace.stepped(self.step - 1, now - self._last_finished)
        else:
            state.pace.undisturbed(now - self._last_finished)
        for failure in resumed:
            state.hooks.event(
                events.Resumed(
                    ranks=list(failure.ranks), stall_seconds=failure.stall_seconds or 0.0
                )
            )
        self._replica_check.stepped(now - self._last_finished)
        self._last_finished = now

    def _repair(self, wanted: dict[ShardSpace, Tensor], budget: int) -> None:
        """Make a round of repair; rows restored and knowledge gained count from the next commit."""
        self.enter("repair")
        self._note_repair(self.state.protection.repair(wanted, budget, self.view))

    def _note_repair(self, report: RepairReport) -> None:
        self.state.repaired, self.state.rebuild_left = report, report.left

    def _reshape_if_needed(self) -> None:
        """At a commit, nothing rebuilding: lay everything out anew if stripe members meet."""
        state = self.state
        due = (
            self.view.epoch != state.reshape_considered
            and not self.view.rebuilding
            and self.step == self.committed
        )
        # a reshape moves whole rows of a commit, and once for each view is enough
        if not due or not state.policy.reshape:
            return
        state.reshape_considered = self.view.epoch
        plan = state.reshape_plan(self.view)
        # the members of every stripe are apart, or no better layout is possible
        if plan is None:
            return
        began = state.clock()
        self._scrub_once_round()  # parity is encoded anew: errors left by then are never found
        self.enter("reshape")
        state.reshape = Reshape(*plan, state.context, state.protection, state.stores, began)
        state.reshape.run()
        self._agree_on_commit()
        self._in_flight.ahead = self._in_flight.replayed = None

    def rebuild_all(self, in_time: Callable[[], bool] | None = None) -> bool:
        """Collective, at a commit: recover all missing rows. Returns whether all rows are back.

        With `in_time`, ends early once `in_time` is false on a rank. Without `in_time`, raises
        StopRequested if a rank asks to stop. Raises StepAborted after a failure.
        """
        # lookups begun ahead wait for missing rows, and the rows come now
        self._in_flight.ahead = self._in_flight.replayed = None
        with self.recovery.recovering():
            while self.view.rebuilding:
                self._repair({}, max(1 << 16, self.state.policy.rebuild_rows_per_step))
                self._agree_on_commit()
                # a stop need not wait for the rebuild: each round is committed
                if in_time is None:
                    self.check_stop()
                # clocks of ranks differ: the first rank out of time decides for all
                elif not self._transport.agree(in_time()):
                    break
        return not self.view.rebuilding

    def scrub_all(self) -> None:
        """Collective, at a commit, nothing rebuilding: scrub all stripes once, if scrubbing is on.

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
            of_all = self._transport.gather([mine.stripes, mine.mismatches]).values()
            return VerifyReport(*map(sum, zip(*of_all, strict=True)))

"""Recovery after deaths: survivors go back to the last commit and share out the roles.

A rank that joins a run under way joins by a recovery, begun on all ranks right after a commit: the
shrink admits the rank, the ledger tells all ranks of the newcomer, and a rank with the newest
commit tells the newcomer the state that every rank has (WELCOME). A newcomer in a broken recovery
stays a newcomer, and is welcomed again.

The states of a rank, STEP being any call inside `recovering`:

    STEP ---- peer failure in a call; `refuse` or `recover` called -------------+
     ^                                                                          |
     |       +------------------------------------------------------------------+
     |       v
     |    SHRINK <---- peer failure in LEDGER, WELCOME, SEE OFF, SPREAD, ROLLBACK or
     |       |         AGREE
     |       |    \
     |       |     +-- too many shrinks in a row without a death ----------------> END
     |       v
     |    LEDGER ----- refusal, error of the inquest, calls failed in vain ------> END
     |       |    ^
     |       |     +-- a newcomer, admitted by the shrink of the other ranks
     |       v
     |    WELCOME ---- every rank with a state is dead --------------------------> END
     |       |
     |       v
     |    RETURN ----- rank without state, or no deltas to undo ------> ROLLBACK
     |       |
     |       v
     |    SEE OFF ---- another try is in vain, or the rank is needed ------------> END
     |       |    \
     |       |     +-- the leaving rank ----------------------------------------> END
     |       |      \
     |       |       + the survivors, once the rank is gone ---------> SHRINK
     |       v
     |    TAKE OVER -- more lost than the protection covers ----------> ROLLBACK
     |       |
     |       v
     |    SPREAD ----- no dense replica left -------------------------> ROLLBACK
     |       |
     |       +-- no message sent since LEDGER --+
     |       v                                  |
     |    AGREE <------------ loaded -----------|---------------------- ROLLBACK
     |       |                                  |                           |
     +-------+ <--------------------------------+                           v
                                                                           END
                 ROLLBACK ends the run without a durable tier, without a state
                 to load, and with a live rank that is to leave.

Back in STEP, `recovering` raises StepAborted; `resume` and a direct `recover` return. `resume`
begins in ROLLBACK, or, after a death before the first call, in SHRINK.

Any rank may die in any state:

    state      | brings a rank to the state             | a death in the state leads to
    -----------+----------------------------------------+---------------------------------------
    STEP       | the start, or a finished recovery      | SHRINK, once a call fails
    SHRINK     | a failed call, or a call of `recover`  | SHRINK itself drops the dead, or
               |                                        | LEDGER fails: SHRINK again
    LEDGER     | a shrink                               | SHRINK; ranks past the agreement follow
    WELCOME    | an agreed ledger with newcomers        | SHRINK; newcomers stay newcomers
    RETURN     | an agreed ledger; no messages          | RETURN goes on; the next message fails
    SEE OFF    | rows at the commit, and a live rank    | SHRINK, also by the end of the leaving
               | that is to leave, by the inquest       | rank; the inquest keeps the finding
    TAKE OVER  | rows at the commit; no messages        | TAKE OVER goes on; the next message
               |                                        | fails, and the newest view counts
    SPREAD     | a new view                             | SHRINK; dense state received is dropped
    ROLLBACK   | too much lost, a rank without state,   | SHRINK, then by way of RETURN to
               | or `resume`                            | ROLLBACK, as survivors lack state
    AGREE      | dense state sent, or a rollback        | SHRINK; ranks already back in STEP
               |                                        | follow by the next call
    END        | an error on all ranks, or on the       | nothing new: the run ends, or the
               | leaving rank alone                     | survivors recover from the leaving rank
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from ecrm.base.errors import (
    ChangedDataError,
    DataError,
    EcrmError,
    ReplicasDiffer,
    ScriptFailed,
    StrayRow,
    Unrecoverable,
)
from ecrm.base.wording import named
from ecrm.engine.dense import spread_dense
from ecrm.engine.engine_events import (
    failure_event,
    interrupted_event,
    joined_event,
    rolled_back_event,
    view_event,
)
from ecrm.engine.failures import MOST_FUTILE, FailureLog, RecoveryRecord
from ecrm.engine.hooks import StepAborted
from ecrm.engine.in_flight import StepInFlight
from ecrm.engine.inquest import Leaving
from ecrm.engine.ledger import Ledger, Noticed
from ecrm.engine.rollback import Durable, Rollback
from ecrm.engine.state import EngineState
from ecrm.engine.step_replay import StepReplay
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View
from ecrm.placement.view_change import plan_join, plan_recovery
from ecrm.transport.base import PeerFailure, Revoked
from ecrm.transport.membership import Admit
from ecrm.transport.message import json_part, of_json_part
from ecrm.transport.piggyback import Outgoing

REFUSALS = {
    kind.__name__: kind
    for kind in (StrayRow, ScriptFailed, ReplicasDiffer, ChangedDataError, DataError)
}
"""Errors for a single rank to end the run on all ranks with, by class name."""


class Recovery:
    """Brings the `state` of this rank back to the last commit after deaths.

    The step in flight is given up.

    - `stopping`: whether all ranks are to stop at this commit, as asked by a rank.
    - `rollbacks`: number of loads from the durable tier.
    - `completed`: number of finished recoveries.
    - `resumed_by_recovery`: whether `resume` needed a recovery, or this rank has joined.
    - `over_at`: the step before the end of training, by the loaded state; `ends_at`: by the wish
      of a rank. -1 for no end.
    """

    def __init__(
        self, state: EngineState, in_flight: StepInFlight, durable: Durable | None = None
    ) -> None:
        self._state, self._in_flight, self._durable = state, in_flight, durable
        self.stopping = False
        self.rollbacks, self.completed, self.resumed_by_recovery = 0, 0, False
        self.over_at = self.ends_at = -1
        # from the beginning of a rollback until the agreement on the end of the rollback
        self._state_lost = False
        self._newcomer = False  # from `join` until the end of the recovery
        self._refusal = ""  # the error of this rank, to end all ranks
        self._noticed = Noticed(0, "start", 0)

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """Around collective calls of the transport: turn PeerFailure into StepAborted.

        The recovery comes first. Any different error passes, also while a peer dies, and the rank
        must then end: an update may be missing in the log. The survivors recover as from any death.
        """
        try:
            self._check_all_live()
            yield
        except PeerFailure as failure:
            # after PeerFailure the log of this rank is complete, after different errors perhaps not
            self.recover(_seen_here(failure))
            raise StepAborted from None

    def _check_all_live(self) -> None:
        # a death between construction and the first call has failed no call: the view is too old
        if self._state.view.live != self._state.transport.live:
            raise PeerFailure("a rank died before the first step")

    def refuse(self, problem: str, kind: type[EcrmError] = StrayRow) -> NoReturn:
        """End the run, called on this rank alone.

        All ranks enter a recovery without a death, and raise `kind`, out of REFUSALS, with
        `problem`.
        """
        self._refusal = f"{kind.__name__} {problem}"
        self.recover()
        raise AssertionError("a recovery went on although a rank refused to")

    def admit(self) -> NoReturn:
        """Collective, right after a commit: let the ranks join that wait; raises StepAborted."""
        self.recover(asks=True)
        raise StepAborted

    def join(self) -> None:
        """Join a run under way, as a rank without state, before the first step of this rank.

        Collective with the recovery of the ranks that have admitted this rank. Raises as `recover`
        does.
        """
        self._state.transport.enter()
        self._newcomer = self.resumed_by_recovery = True  # the loops of all ranks go on alike
        self._state.begin_anew(self._state.protection.shape)
        self.recover(shrunk=True)

    def recover(self, why: str = "", asks: bool = False, shrunk: bool = False) -> None:
        """Collective among survivors: go back to the commit and share out the dead ranks' roles.

        `why` is the failure seen by this rank, if any. With `asks`, ranks that wait join. With
        `shrunk` the transport has just shrunk. Raises Unrecoverable, on every survivor, after
        losses beyond the protection without a durable tier, or if calls keep failing without a
        death; an error of REFUSALS for a refusal; the errors of the inquest.
        """
        state, flight = self._state, self._in_flight
        inquest = state.hooks.inquest
        inquest.begin()
        transport, began = state.transport, state.clock()
        # in phase commit `step` has moved on already; a step being applied counts as begun
        self._noticed = Noticed(
            state.step - (flight.phase == "commit"), flight.phase, state.step + flight.updating
        )
        replay = flight.give_up()
        rollbacks, before, held, begins = self.rollbacks, state.view, state.view, True
        # ranks may die during recovery: every state may be repeated, so begin again at the shrink
        while True:
            try:
                if not shrunk:
                    live = transport.live
                    transport.shrink(self._admits(asks) if begins else Admit.NO)
                    state.failures.shrunk(changed=transport.live != live)
                # in a broken recovery views may lack a death: a number must not return unseen
                shrunk = begins = False
                # If ledgers keep failing, no count is ever agreed on. The rank then gives up alone,
                # at twice the limit: the own count may be too high, after a missed commit.
                state.failures.check(state.failures.futile, why, 2 * MOST_FUTILE)
                state.hooks.phase(state.step, "recover")
                received_dense, agreed, flight.replayed = None, False, None
                findings = inquest.find(self._dead_since(held))
                ledger = self._ledger(replay, why, findings).agreed(transport)
                leaving = self._judge(ledger)
                if ledger.newcomers:
                    before = self._welcome(ledger, before)
                    held = before if self._newcomer else held
                    self._introduce()
                try:
                    self._return_to_commit(ledger)
                    # at the commit: its view and rows decide whether the rank is needed
                    if leaving is not None:
                        self._see_off(leaving, ledger)
                    # a reshape was committed: reports must name shards by the new numbers
                    if len(before.shards) != len(state.view.shards):
                        before = state.view
                    last = state.view
                    self._take_over()
                    # Results hold only for the step right after the commit. All ranks must replay
                    # together: lookups with and without messages do not match.
                    if replay is not None and ledger.replays == state.committed:
                        flight.replayed = replay.again(
                            state.lookup_context(flight.rebuild_rows(state.pace, state.step)),
                            last,
                            transport.live,
                            ledger.told,
                        )
                    # the ledger's agreement is enough if no dense state is sent afterwards
                    agreed = bool(ledger.dense) and set(state.view.dense) <= set(ledger.dense)
                    agreed = agreed and not ledger.newcomers
                    received_dense = spread_dense(
                        transport, state.view.dense, ledger.dense, state.export_dense
                    )
                except Unrecoverable as error:
                    # all survivors judge by the same ledger: all roll back, or no rank does
                    # the error of a rank is the better message: the loss only forbids another try
                    if leaving is not None:
                        raise leaving.ending(str(error)) from None
                    lost = [rank for rank in held.live if rank not in transport.live]
                    problem = f"{error}{inquest.in_words(lost)}"
                    self._roll_back(Unrecoverable(problem), began)
                    # messages were sent after the ledger, and results belong to rows now dropped
                    agreed, flight.replayed = False, None
                    # the newest layout of all ranks was loaded: shards may have new numbers
                    if len(before.shards) != len(state.view.shards):
                        before = state.view
                # the ledger has the right count: the own count may miss a commit
                state.failures.futile = ledger.futile
                # a rank may die while sending: dense state or rows count from an agreement on
                if agreed or transport.agree(True):
                    break
            except PeerFailure as failure:
                # a `Revoked` tells no reason: keep the reason seen before
                why = _seen_here(failure) or why
        self._state_lost = False
        # after the agreement, so that a broken recovery leaves no half-spread dense state
        if received_dense is not None:
            state.load_dense(received_dense)
        dead = tuple(rank for rank in before.live if rank not in transport.live)
        joined = tuple(rank for rank in transport.live if rank not in before.live)
        self._newcomer = False
        # calls may fail though no rank died: such a recovery is no failure, but an interruption
        if dead:
            self._record_failure(dead, before, began)
            for told in inquest.events(dead):
                state.hooks.event(told)
        elif not joined:
            self._record_interruption(ledger.why_in_words, began)
        if joined:
            state.hooks.event(joined_event(joined, state.view, state.step, state.failures_left))
        # a rollback has loaded all rows: no lost shard waits for a rebuild any more
        if self.rollbacks > rollbacks:
            state.failures.shards_whole(list(range(len(before.shards))), (), {}, state.clock())
        state.hooks.event(view_event(state.step, state.view))
        self.completed += 1
        state.hooks.recovered()

    def _dead_since(self, held: View) -> dict[int, tuple[int, ...]]:
        """The ranks dead since the view `held`, with their slots.

        `held` is the view at the beginning of the recovery: no slot has run in later views.
        """
        dead = sorted(set(held.live) - set(self._state.transport.live))
        return {rank: held.slots_of(rank) for rank in dead}

    def _admits(self, asks: bool) -> Admit:
        """The wish for ranks that wait, at the begin of a recovery.

        Ranks join right after the commit of a step. If a rank asks, the step is committed: all
        other ranks ask too, or have failed in the agreement on the commit.
        """
        if self._state.view.live != self._state.transport.live or self._noticed.phase != "commit":
            return Admit.NO
        return Admit.ASKS if asks else Admit.MAY

    def _welcome(self, agreed: Ledger, before: View) -> View:
        """Collective: tell newcomers the state that every rank has at the newest commit.

        Returns the view of the other ranks at the beginning of their recovery, `before`.
        """
        state, rank = self._state, self._state.rank
        if not agreed.newest:
            raise Unrecoverable("every rank with a state died while ranks were joining")
        outgoing: Outgoing = {}
        if rank == agreed.newest[0]:
            parts = [json_part([before.to_json(), *self._known_to_all()])]
            outgoing = dict.fromkeys(agreed.newcomers, parts)
        received = state.transport.exchange(outgoing)
        if rank not in agreed.newcomers:
            return before
        ((told, *known),) = map(of_json_part, received[agreed.newest[0]])
        self._learn(agreed, *known)
        return View.from_json(told)

    def _introduce(self) -> None:
        """Collective: make newcomers and the other ranks known to each other."""
        transport, introductions = self._state.transport, self._state.hooks.introductions
        answer = introductions.meet(transport.gather(introductions.about()))
        introductions.met(transport.gather(answer))

    def _known_to_all(self) -> tuple[list[int], list[Any], dict[str, Any], dict[str, Any]]:
        """The state of this recovery, of the engine, of failures and of scrubbing, as JSON."""
        state, shape = self._state, self._state.protection.shape
        return (
            [self.rollbacks, self.completed, self.over_at, self.ends_at],
            [state.committed, shape.shards, shape.k, list(state.live_at_commit)],
            state.failures.told(),
            {} if state.scrub is None else state.scrub.told(),
        )

    def _learn(
        self,
        agreed: Ledger,
        mine: list[int],
        engine: list[Any],
        failures: dict[str, Any],
        scrub: dict[str, Any],
    ) -> None:
        """Take the state told by `_known_to_all`."""
        state = self._state
        self.rollbacks, self.completed, self.over_at, self.ends_at = mine
        committed, shards, k, live_at_commit = engine
        state.begin_anew(StripeShape(shards, k, state.protection.shape.m))
        state.step = state.committed = state.context.committed = committed
        state.commits, state.live_at_commit = agreed.commits, tuple(live_at_commit)
        state.failures = FailureLog.of(failures)
        if state.scrub is not None:
            state.scrub.take(scrub)

    def _ledger(self, replay: StepReplay | None, why: str, findings: str) -> Ledger:
        """The ledger of this rank, for sharing."""
        state, rank = self._state, self._state.rank
        return Ledger(
            state.commits,
            state.view,
            state.step + self._in_flight.changed - state.committed,
            self.stopping or state.hooks.asks(),
            self._state_lost,
            () if state.dense is None else (rank,),
            self._noticed,
            -1 if replay is None else replay.step,
            {} if replay is None else {rank: replay.told(state.transport.live)},
            state.failures.futile,
            {rank: why} if why else {},
            {rank: self._refusal} if self._refusal else {},
            {rank: findings},
            (rank,) if self._newcomer else (),
        )

    def _judge(self, agreed: Ledger) -> Leaving | None:
        """The live ranks that are to leave, by the inquest.

        Raises the error ending the run, the same on all ranks: refusal, inquest, LostTouch.
        """
        if agreed.refusals:
            # several ranks may refuse: the lowest speaks, so all ranks raise the same error
            speaker, problem = min(agreed.refusals.items())
            kind, _, problem = problem.partition(" ")
            error = REFUSALS[kind](problem).on_all_ranks(speaker)
            # all ranks must hear of the refusal before the first rank leaves
            with suppress(PeerFailure):
                self._state.transport.barrier("others told of a refusal")
            raise error
        noticed, live = agreed.noticed, self._state.transport.live
        inquest = self._state.hooks.inquest
        leaving = inquest.hear(
            agreed.findings.values(), noticed.step, noticed.phase, live, agreed.newcomers
        )
        self._state.failures.check(agreed.futile, agreed.why_in_words)
        return leaving

    def _see_off(self, leaving: Leaving, agreed: Ledger) -> NoReturn:
        """At the commit: make ranks leave, or end the run.

        Raises the error of `leaving` on all ranks, or ScriptFailed on a leaving rank alone; then
        PeerFailure on the survivors, once the rank is gone.
        """
        # all ranks judge alike, by the same ledger and view: no message is needed
        if reason := leaving.again or self._why_needed(leaving, agreed):
            raise leaving.ending(reason)
        state = self._state
        # without a `speaker`: the error of this rank only, and the survivors recover
        if state.rank in leaving.errors:
            raise ScriptFailed(leaving.errors[state.rank])
        # wait for the death: the call fails once the rank is gone
        state.transport.barrier("others saw a rank off")
        raise AssertionError(f"rank {min(leaving.errors)} stays though it was to leave")

    def _why_needed(self, leaving: Leaving, agreed: Ledger) -> str:
        """The reason against going on without the `leaving` ranks; "" for no reason."""
        state, protection = self._state, self._state.protection
        live = [rank for rank in state.transport.live if rank not in leaving.errors]
        # a second try may take the rank down too: only without shards does no row go with the rank
        if leaving.risky and all(state.view.shards_of(rank) for rank in live):
            return "no other trainer or spare is left to try it"
        # without deltas a death allows no undo; without a dense replica nothing goes on
        if not protection.keeps_deltas or not set(live) & set(agreed.dense):
            return f"protection {protection.name} cannot do without the rank"
        # a rank must not leave if a further death is too much for the protection
        try:
            self._view_after(live)
        except Unrecoverable:
            return "the run cannot do without the rank: too much is lost already"
        return ""

    def _return_to_commit(self, agreed: Ledger) -> None:
        """Take the last commit and the newest view of all survivors; undo later updates."""
        state = self._state
        self.stopping, self._noticed = agreed.asks, agreed.noticed
        # a broken rollback leaves some ranks without the rows of any commit: load again
        if agreed.state_lost:
            raise Unrecoverable("a rank died while all were rolling back")
        commits, begun, protection = agreed.commits, agreed.begun, state.protection
        # without deltas no update can be undone; after deaths `_take_over` raises the error
        if begun and not protection.keeps_deltas and state.view.live == state.transport.live:
            raise Unrecoverable(
                "ranks lost touch with each other, none of them died: "
                f"protection {protection.name} cannot take back "
                f"the updates since step {state.committed}"
            )
        # A rank may miss the answer to an agreement. A yes on any rank proves the step finished on
        # this rank too: accept the commit, and undo nothing.
        if commits > state.commits:
            assert commits == state.commits + 1, (
                f"rank {state.rank} has {state.commits} commits, another {commits}"
            )
            state.accept_commit()
            state.hooks.committed()
        else:
            state.undo()
        # a broken recovery may have planned a view on some ranks only: plan on from the newest
        if agreed.view.epoch > state.view.epoch:
            state.view = agreed.view
        state.step = state.committed
        self._in_flight.updating = self._in_flight.changed = False

    def _take_over(self) -> None:
        """Adopt the next view: host the shards of this rank, new shards empty at first."""
        state, protection, live = self._state, self._state.protection, self._state.transport.live
        dead = [rank for rank in state.view.live if rank not in live]
        # without deltas survivors cannot go back to the commit, and lost rows cannot come back
        if dead and not protection.keeps_deltas:
            raise Unrecoverable(f"{named('rank', dead)} died: {protection.after_deaths}")
        # a pure function of view and dead: all survivors find the same view without a message
        if dead:
            state.view = self._view_after(live)
        if joined := [rank for rank in live if rank not in state.view.live]:
            state.view = plan_join(
                state.view, joined, state.first_view, state.policy.dense_replicas
            )
        # without new deaths too: the newest view may be from a recovery broken off elsewhere
        state.host_shards(missing=True)
        protection.adopt(state.view)

    def _view_after(self, live: Sequence[int]) -> View:
        """The view with only `live` ranks left. Raises Unrecoverable after too many losses."""
        state, protection = self._state, self._state.protection
        dead = [rank for rank in state.view.live if rank not in live]
        # `plan_recovery` counts lost units of the view, not earlier deaths since the commit
        protection.check_losses(state.view, dead, state.lost_since_commit(live), state.committed)
        return plan_recovery(
            state.view,
            dead,
            protection.shape,
            state.policy.dense_replicas,
            protection.in_words,
            protection.any_shards_may_be_lost,
            protection.rebuilding_may_move,
        )

    def resume(self) -> None:
        """Collective, before the first step: go on from the durable tier, despite deaths meanwhile.

        Raises an EcrmError on every rank if the durable tier has no state to go on from.
        """
        state = self._state
        try:
            self._check_all_live()
            self._roll_back(Unrecoverable("nothing to resume from"), state.clock(), told=False)
            # a rank may die while sending rows: loaded rows count from an agreement on
            state.transport.barrier("all were resuming")
            self._state_lost = False
        except PeerFailure:
            # the state is partly loaded, and of no commit: the recovery must load everything
            self._state_lost = True
            self.recover()
            self.resumed_by_recovery = True

    def _roll_back(self, why: Unrecoverable, began: float, told: bool = True) -> None:
        """Collective: load the newest checkpoint on the surviving ranks.

        Raises `why` without a durable tier. With `told`, an event reports the rollback.
        """
        # without a durable tier the loss is final
        if self._durable is None:
            raise why
        state, flight = self._state, self._in_flight
        # before rows are dropped: after a death from now on, all ranks must load again
        self._state_lost, begun = True, state.step + flight.updating
        state.hooks.phase(state.step, "rollback")
        state.drop_rows()
        loaded = Rollback(
            self._durable,
            state.transport,
            (state.commits, state.view, state.protection.shape),
            state.stores,
            state.context,
            state.protection,
            state.policy.dense_replicas,
        )
        state.take_loaded(loaded)
        over, ends = (False, -1) if state.dense is None else (state.dense.over, state.dense.ends_at)
        # only dense holders have loaded the end of training: tell all ranks
        known = state.transport.gather([over, ends]).values()
        self.over_at = state.step if any(over for over, _ in known) else -1
        self.ends_at = max(self.ends_at, *(ends for _, ends in known))
        # the loaded step is past the end already: no later step would notice
        if 0 <= self.ends_at <= state.step:
            self.over_at = state.step
        flight.ahead, flight.updating = None, False
        self.rollbacks += 1
        # a resume is a start, not a loss to report
        if told:
            state.hooks.event(
                rolled_back_event(state.step, state.view, begun, str(why), state.clock() - began)
            )

    @property
    def _redone(self) -> int:
        """Number of steps begun before the recovery and undone by the recovery."""
        return max(self._noticed.begun - self._state.committed, 0)

    def _record_interruption(self, why: str, began: float) -> None:
        state, (step, phase, _) = self._state, self._noticed
        number, seconds = state.failures.interruptions, state.clock() - began
        state.hooks.event(
            interrupted_event(number, step, phase, state.committed, self._redone, seconds, why)
        )

    def _record_failure(self, dead: tuple[int, ...], before: View, began: float) -> None:
        state = self._state
        shards = tuple(shard for shard, host in enumerate(before.shards) if host in dead)
        slots = tuple(slot for slot, host in enumerate(before.slots) if host in dead)
        failure = RecoveryRecord(
            ranks=dead,
            step=self._noticed.step,
            phase=self._noticed.phase,
            redone_steps=self._redone,
            noticed_at=began,
            recovery_seconds=state.clock() - began,
            shards=shards,
            slots=slots,
            rebuilt_bytes=len(shards) * state.stores.bytes_of_a_shard(state.layouts),
        )
        state.failures.failures.append(failure)
        state.hooks.event(
            failure_event(
                failure,
                before,
                state.view,
                state.committed,
                state.failures_left,
                state.failures_left_when_rebuilt,
            )
        )


def _seen_here(failure: PeerFailure) -> str:
    """The failure seen by this rank, in words; "" for a recovery begun by a different rank."""
    return "" if isinstance(failure, Revoked) else str(failure)

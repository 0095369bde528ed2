"""What survivors do when ranks die: go back to the last commit and share out the roles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch

from ecrm.base.wording import named
from ecrm.engine.dense import spread_dense
from ecrm.engine.engine_events import (
    failure_event,
    interrupted_event,
    rolled_back_event,
    slot_failed_event,
)
from ecrm.engine.failures import MOST_IN_VAIN, Failure
from ecrm.engine.hooks import StepAborted
from ecrm.engine.in_flight import StepInFlight
from ecrm.engine.ledger import Ledger, Noticed
from ecrm.engine.rollback import Durable, Rollback
from ecrm.engine.slot_faults import UNJUDGED, Fault, Place, deadly, raised_before, together_in
from ecrm.engine.state import EngineState
from ecrm.engine.step_replay import StepReplay
from ecrm.errors import (
    ChangedDataError,
    EcrmError,
    ReplicasDiffer,
    ScriptFailed,
    StrayRow,
    Unrecoverable,
)
from ecrm.placement.view import View
from ecrm.placement.view_change import plan_recovery
from ecrm.transport.base import PeerFailure, Revoked
from ecrm.transport.message import tensors

REFUSALS = {
    kind.__name__: kind for kind in (StrayRow, ScriptFailed, ReplicasDiffer, ChangedDataError)
}
"""Errors with which one rank can end the run on all ranks."""


class Recovery:
    """Brings the `state` of this rank back to the last commit when others die.

    The step in flight is given up. `stopping` is whether all are to stop at this commit since one
    of them asks for it, `doubts`, for others to set, whether this rank doubts its input, `doubted`
    whether one did in the last recovery, `rollbacks` how often everything was loaded from the
    durable tier, `through` how many recoveries are, `began_with_one` whether `resume` came through
    by one, `over_at` the step before which data has ended, by what was loaded, `ends_at` the step
    before which somebody wants training to end, `faults` how ranks have ended in slots that user
    code was at work on.
    """

    def __init__(
        self, state: EngineState, in_flight: StepInFlight, durable: Durable | None = None
    ) -> None:
        self._state, self._in_flight, self._durable = state, in_flight, durable
        self.stopping = self.doubts = self.doubted = False
        self.rollbacks, self.through, self.began_with_one = 0, 0, False
        self.over_at = self.ends_at = -1
        # from the moment a rollback begins until all agree that it is through
        self._state_lost = False
        self._refusal = ""  # why this rank wants all to end
        self.faults: dict[int, Fault] = {}  # the same on all ranks after each recovery
        self._mine: dict[int, Fault] = {}  # what this rank knows of those that a recovery is for
        self._noticed = Noticed(0, "start", 0)

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """Around collective calls of the transport: turn a peer's failure into StepAborted.

        A peer's failure is what the transport calls one; the recovery comes first. Anything else
        passes, also while a peer dies, and the rank must then end: an update may have been made
        that its log does not have. The others recover from that as from any death.
        """
        try:
            self._check_all_live()
            yield
        except PeerFailure as failure:
            self.recover(_seen_here(failure))
            raise StepAborted from None

    def _check_all_live(self) -> None:
        if self._state.view.live != self._state.transport.live:
            raise PeerFailure("a rank died before the first step")

    def refuse(self, problem: str, kind: type[EcrmError] = StrayRow) -> NoReturn:
        """Of this rank alone: end the run.

        All ranks come into a recovery, nobody dies, and each raises `kind`, one of REFUSALS, with
        `problem`.
        """
        self._refusal = f"{kind.__name__} {problem}"
        self.recover()
        raise AssertionError("a recovery went on although a rank refused to")

    def leave(self, place: Place, problem: str) -> NoReturn:
        """Of this rank alone: user code has raised at `place`, and `problem` says what.

        Where the slot can be tried on another rank, and nothing like it came before, raises
        ScriptFailed on this rank alone, without a `speaker`: it must end, and the others recover.
        Else raises ScriptFailed with a `speaker` on all ranks.
        """
        self.recover(raised=Fault((place,), error=problem))
        raise AssertionError("a recovery went on with a rank that user code has failed on")

    def recover(self, why: str = "", raised: Fault | None = None) -> None:
        """Collective among survivors: go back to the commit and share out the dead ranks' roles.

        A rank that `doubts` its input may begin one, with nobody dead; `why` is what this rank has
        seen fail, if it has; `raised` is why it wants to `leave`. Raises Unrecoverable, on every
        survivor, when more was lost than the protection covers, or when calls keep failing though
        nobody dies; ScriptFailed where user code takes its ranks down one after the other.
        """
        state, flight = self._state, self._in_flight
        self._mine = {} if raised is None else {state.rank: raised}
        transport, began = state.transport, state.clock()
        self._noticed = Noticed(
            state.step - (flight.phase == "commit"), flight.phase, state.step + flight.updating
        )
        replay = flight.give_up()
        rollbacks, before, held = self.rollbacks, state.view, state.view
        while True:
            try:
                live = transport.live
                transport.shrink()
                state.failures.shrunk(died=transport.live != live)
                # where not even the ledger comes through
                state.failures.check(state.failures.in_vain, why, 2 * MOST_IN_VAIN)
                state.hooks.phase(state.step, "recover")
                heir, agreed, flight.replayed = None, False, None
                self._look_for_dead(held)
                ledger = self._ledger(replay, why).agreed(transport)
                state.seals = ledger.seals
                self._end_if_all_must(ledger)
                try:
                    self._return_to_commit(ledger)
                    self._see_off(ledger)
                    if len(before.shards) != len(state.view.shards):
                        before = state.view  # a reshape was committed: shards have new numbers
                    last = state.view
                    self._take_over()
                    if replay is not None and ledger.replays == state.committed:
                        flight.replayed = replay.again(
                            state.lookup_context(flight.rebuild_rows(state.policy)),
                            last,
                            transport.live,
                            ledger.told,
                        )
                    # and nothing was sent after it
                    agreed = bool(ledger.dense) and set(state.view.dense) <= set(ledger.dense)
                    heir = spread_dense(
                        transport, state.view.dense, ledger.dense, state.export_dense
                    )
                except Unrecoverable as error:
                    self._end_if_raised(str(error))
                    lost = [rank for rank in held.live if rank not in transport.live]
                    problem = f"{error}{together_in(self.faults, lost)}"
                    self._roll_back(Unrecoverable(problem), began)
                    agreed, flight.replayed = False, None
                    if len(before.shards) != len(state.view.shards):
                        before = state.view
                state.failures.in_vain = ledger.in_vain
                if agreed or transport.agree(True):
                    break
            except PeerFailure as failure:
                why = _seen_here(failure) or why
        self._state_lost = False
        if heir is not None:
            state.load_dense(heir)
        dead = tuple(rank for rank in before.live if rank not in transport.live)
        if dead:
            self._record_failure(dead, before, began)
            self._tell_of_slots(dead)
        else:
            self._record_interruption(ledger.why_in_words, began)
        if self.rollbacks > rollbacks:
            state.failures.shards_whole(list(range(len(before.shards))), (), {}, state.clock())
        state.hooks.event({"event": "view", "step": state.step, "view": state.view})
        self.through += 1
        state.hooks.recovered()

    def _ledger(self, replay: StepReplay | None, why: str) -> Ledger:
        """What this rank has to say."""
        state, rank = self._state, self._state.rank
        return Ledger(
            state.commits,
            state.view,
            state.step + self._in_flight.changed - state.committed,
            self.stopping or state.hooks.asks(),
            self.doubts,
            self._state_lost,
            () if state.dense is None else (rank,),
            self._noticed,
            -1 if replay is None else replay.step,
            {} if replay is None else {rank: replay.told(state.transport.live)},
            state.failures.in_vain,
            {rank: why} if why else {},
            {rank: self._refusal} if self._refusal else {},
            {**self._mine, **self.faults},
            state.seals,
        )

    def _end_if_all_must(self, agreed: Ledger) -> None:
        """Raise what ends the run, the same on all ranks: what one refuses, or LostTouch."""
        if agreed.refusals:
            speaker, problem = min(agreed.refusals.items())
            kind, _, problem = problem.partition(" ")
            error = REFUSALS[kind](problem)
            error.speaker = speaker
            with suppress(PeerFailure):
                self._state.transport.agree(True)  # all have heard it before the first one leaves
            raise error
        self.faults = {rank: fault for rank, fault in agreed.faults.items() if fault.places}
        if not self._raising and (problem := deadly(self.faults)):
            self._end_script(problem, self._state.transport.live[0])
        self._state.failures.check(agreed.in_vain, agreed.why_in_words)

    def _look_for_dead(self, held: View) -> None:
        """Note what this rank can know of how ranks have ended.

        `held` is the view with which the recovery began: in later ones nobody has run a slot.
        """
        for rank in sorted(set(held.live) - set(self._state.transport.live)):
            if rank not in self.faults and rank not in self._mine:
                places = self._state.hooks.whereabouts(rank)
                slots = held.slots_of(rank)
                if places is None:
                    self._mine[rank] = Fault.unknown(slots)
                    continue
                judged = tuple(place for place in places if place.part not in UNJUDGED)
                self._mine[rank] = Fault(judged)

    @property
    def _raising(self) -> list[int]:
        """The ranks, all alive, that user code has failed on."""
        live = self._state.transport.live
        return [rank for rank, fault in self.faults.items() if fault.error and rank in live]

    def _end_if_raised(self, reason: str) -> None:
        """On all ranks or none: end the run if user code has failed on a rank that is alive."""
        if raising := self._raising:
            speaker = raising[0]
            self._end_script(f"{self.faults[speaker].error} ({reason})", speaker)

    @staticmethod
    def _end_script(problem: str, speaker: int) -> NoReturn:
        error = ScriptFailed(problem)
        error.speaker = speaker
        raise error

    def _see_off(self, agreed: Ledger) -> None:
        """At the commit: have a rank that user code has failed on leave, or end the run.

        Raises ScriptFailed, and PeerFailure on all but the rank that leaves, once it is gone.
        """
        raising = self._raising
        if not raising:
            return
        if reason := raised_before(self.faults, raising[0]) or self._cannot_leave(raising, agreed):
            self._end_if_raised(reason)
        state = self._state
        if state.rank in raising:
            raise ScriptFailed(self.faults[state.rank].error)
        state.transport.agree(True)
        raise AssertionError(f"rank {raising[0]} stays though it was to leave")

    def _cannot_leave(self, leaving: Sequence[int], agreed: Ledger) -> str:
        """Why others cannot go on without ranks that are alive; "" where they can."""
        state, protection = self._state, self._state.protection
        live = [rank for rank in state.transport.live if rank not in leaving]
        if not any(not state.view.shards_of(rank) for rank in live):
            return "no other trainer or spare is left to try it"
        if not protection.keeps_deltas or not set(live) & set(agreed.dense):
            return f"protection {protection.name} cannot do without the rank"
        try:
            self._view_after(live)
        except Unrecoverable:
            return "the run cannot do without the rank: too much is lost already"
        return ""

    def _return_to_commit(self, agreed: Ledger) -> None:
        """Take the last commit and the newest view of all survivors; undo what is past it."""
        state = self._state
        self.stopping, self.doubted, self._noticed = agreed.asks, agreed.doubts, agreed.noticed
        if agreed.state_lost:
            raise Unrecoverable("a rank died while all were rolling back")
        commits, begun, protection = agreed.commits, agreed.begun, state.protection
        # deaths: _take_over
        if begun and not protection.keeps_deltas and state.view.live == state.transport.live:
            raise Unrecoverable(
                "ranks lost touch with each other, none of them died: "
                f"protection {protection.name} cannot take back "
                f"the updates since step {state.committed}"
            )
        if commits > state.commits:
            assert commits == state.commits + 1, (
                f"rank {state.rank} has {state.commits} commits, another {commits}"
            )
            state.accept_commit()
            state.hooks.committed()
        else:
            state.undo()
        if agreed.view.epoch > state.view.epoch:
            state.view = agreed.view
        state.step = state.committed
        self._in_flight.updating = self._in_flight.changed = False

    def _take_over(self) -> None:
        """Adopt the next view: host its shards, empty at first."""
        state, protection, live = self._state, self._state.protection, self._state.transport.live
        dead = [rank for rank in state.view.live if rank not in live]
        if dead and not protection.keeps_deltas:
            raise Unrecoverable(f"{named('rank', dead)} died: {protection.after_deaths}")
        if dead:
            state.view = self._view_after(live)
        state.host_shards(missing=True)
        protection.adopt(state.view)

    def _view_after(self, live: Sequence[int]) -> View:
        """The view once only these ranks are left. Raises Unrecoverable where they are too few."""
        state, protection = self._state, self._state.protection
        dead = [rank for rank in state.view.live if rank not in live]
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
        """Collective, before the first step: go on from the durable tier, whoever dies meanwhile.

        Raises an EcrmError on every rank where there is nothing to go on from.
        """
        state = self._state
        try:
            self._check_all_live()
            self._roll_back(Unrecoverable("nothing to resume from"), state.clock(), told=False)
            if not state.transport.agree(True):
                raise PeerFailure("a rank died while all were resuming")
            self._state_lost = False
        except PeerFailure:
            self._state_lost = True
            self.recover()
            self.began_with_one = True

    def _roll_back(self, why: Unrecoverable, began: float, told: bool = True) -> None:
        """Collective: load the newest checkpoint on the ranks that are left.

        Raises `why` without a durable tier.
        """
        if self._durable is None:
            raise why
        state, flight = self._state, self._in_flight
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
        said = state.transport.share([torch.tensor([over, ends])])
        known = [tensors(of)[0].tolist() for of in said.values()]
        self.over_at = state.step if any(over for over, _ in known) else -1
        self.ends_at = max(self.ends_at, *(ends for _, ends in known))
        if 0 <= self.ends_at <= state.step:
            self.over_at = state.step
        flight.ahead, flight.updating = None, False
        self.rollbacks += 1
        if told:
            state.hooks.event(
                rolled_back_event(state.step, state.view, begun, str(why), state.clock() - began)
            )

    @property
    def _redone(self) -> int:
        """Steps that were begun before the recovery that is through, and are undone."""
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
        failure = Failure(
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

    def _tell_of_slots(self, dead: Sequence[int]) -> None:
        """Tell of those who have died, or left, while user code was at work on their slots."""
        for rank in dead:
            fault = self.faults.get(rank)
            if fault is not None and fault.known:
                self._state.hooks.event(slot_failed_event(rank, fault))


def _seen_here(failure: PeerFailure) -> str:
    """What failed, as this rank has seen it; empty where it only heard of a recovery."""
    return "" if isinstance(failure, Revoked) else str(failure)

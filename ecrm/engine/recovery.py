"""What survivors do when ranks die: agree on the last commit, go back to it, and share out the dead ranks' roles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from ecrm.engine.dense import DenseReplica, spread_dense
from ecrm.engine.engine_events import failure_event, interrupted_event, rolled_back_event
from ecrm.engine.failures import MOST_IN_VAIN, Failure
from ecrm.engine.hooks import EnginePolicy, Hooks, StepAborted
from ecrm.engine.ledger import Ledger, Noticed
from ecrm.engine.lookup import Lookup, Where
from ecrm.engine.rollback import Durable, Rollback
from ecrm.engine.shard_stores import ShardStores
from ecrm.engine.state import EngineState
from ecrm.engine.step_log import StepLog
from ecrm.engine.step_replay import Resume
from ecrm.errors import Unrecoverable, UsageError
from ecrm.placement.view import View
from ecrm.placement.view_change import plan_recovery
from ecrm.protection.base import Protection
from ecrm.transport.base import PeerFailure, Revoked, Transport
from ecrm.wording import named


class Recovery(EngineState):
    """The state of one rank that outlives failures of others.

    `stopping` is whether all are to stop at this commit since one of them asks for it, `doubts`,
    for others to set, whether this rank doubts its input, `doubted` whether one did in the last
    recovery, `rollbacks` how often everything was loaded from the durable tier.
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
        durable: Durable | None = None,
    ) -> None:
        super().__init__(transport, stores, view, protection, make_dense, policy, hooks, clock)
        self._durable = durable
        self.stopping = self.doubts = self.doubted = False
        self.rollbacks = 0
        # from the moment a rollback begins until all agree that it is through
        self._state_lost = False
        self._recovered = False  # and nothing was looked up since
        self._refusal = ""  # why this rank wants all to end
        # Of the step that is under way, which a recovery gives up:
        self._phase = "start"
        # whether it is being applied, and whether rows may have changed
        self._updating = self._changed = False
        self._lookup: Lookup | None = None
        self._ahead: Lookup | None = None  # the next one's
        self._resume: Resume | None = None  # once all slots have computed
        self._resumed: Lookup | None = None  # what the next lookup needs no message for

    @property
    def _where(self) -> Where:
        return Where(self.view, self.layouts, self.hosted, self.protection, self._rebuild_rows)

    @property
    def _rebuild_rows(self) -> int:
        """Background rows of a round of repair: none in the first one after a recovery, for which all ranks stand still."""
        return 0 if self._recovered else self._policy.rebuild_rows_per_step

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """Around collective calls of the transport: turn a peer's failure into a recovery and StepAborted.

        A peer's failure is what the transport calls one. Anything else passes, also while a peer
        dies, and the rank must then end: an update may have been made that its log does not have.
        The others recover from that as from any death.
        """
        try:
            if self.view.live != self.transport.live:
                raise PeerFailure("a rank died before the first step")
            yield
        except PeerFailure as failure:
            self.recover(_seen_here(failure))
            raise StepAborted from None

    def refuse(self, problem: str) -> NoReturn:
        """Of this rank alone: end the run. All ranks come into a recovery, nobody dies, and each raises UsageError with `problem`."""
        self._refusal = problem
        self.recover()
        raise AssertionError("a recovery went on although a rank refused to")

    def recover(self, why: str = "") -> None:
        """Collective among survivors: agree on the commit, go back to it, share out the dead ranks' roles.

        A rank that `doubts` its input may begin one, with nobody dead; `why` is what this rank has
        seen fail, if it has. Raises Unrecoverable, on every survivor, when more was lost than the
        protection covers, or when calls keep failing though nobody dies.
        """
        began = self._clock()
        self._noticed = Noticed(
            self.step - (self._phase == "commit"), self._phase, self.step + self._updating
        )
        resume, self._resume = self._resume, None
        self._ahead = self._lookup = self._resumed = None  # with what they hold
        self._recovered = True
        rollbacks, before = self.rollbacks, self.view
        while True:
            try:
                live = self.transport.live
                self.transport.shrink()
                self.failures.shrunk(died=self.transport.live != live)
                # where not even the ledger comes through
                self.failures.check(self.failures.in_vain, why, 2 * MOST_IN_VAIN)
                self._hooks.phase(self.step, "recover")
                heir, agreed, self._resumed = None, False, None
                ledger = self._ledger(resume, why).agreed(self.transport)
                self._end_if_all_must(ledger)
                try:
                    self._return_to_commit(ledger)
                    if len(before.shards) != len(self.view.shards):
                        before = self.view  # a reshape was committed: shards have new numbers
                    last = self.view
                    self._take_over()
                    if ledger.resumes == self.committed:
                        self._resumed = resume.again(
                            self._where, last, self.transport.live, ledger.told
                        )
                    # and nothing was sent after it
                    agreed = bool(ledger.dense) and not set(self.view.dense).difference(
                        ledger.dense
                    )
                    heir = spread_dense(
                        self.transport, self.view.dense, ledger.dense, self.export_dense
                    )
                except Unrecoverable as error:
                    self._roll_back(error, began)
                    agreed, self._resumed = False, None
                    if len(before.shards) != len(self.view.shards):
                        before = self.view
                self.failures.in_vain = ledger.in_vain
                if agreed or self.transport.agree(True):
                    break
            except PeerFailure as failure:
                why = _seen_here(failure) or why
        self._state_lost = False
        if heir is not None:
            self._load_dense(heir)
        dead = tuple(rank for rank in before.live if rank not in self.transport.live)
        if dead:
            self._record_failure(dead, before, began)
        else:
            step, phase, _ = self._noticed
            number, seconds = self.failures.interruptions, self._clock() - began
            self._hooks.event(
                interrupted_event(
                    number, step, phase, self.committed, self._redone, seconds, ledger.why_in_words
                )
            )
        if self.rollbacks > rollbacks:
            self.failures.shards_whole(list(range(len(before.shards))), (), {}, self._clock())
        self._hooks.event({"event": "view", "step": self.step, "view": self.view})
        self._hooks.recovered()

    def _ledger(self, resume: Resume | None, why: str) -> Ledger:
        """What this rank has to say."""
        return Ledger(
            self._commits,
            self.view,
            self.step + self._changed - self.committed,
            self.stopping or self._hooks.asks(),
            self.doubts,
            self._state_lost,
            () if self.dense is None else (self.rank,),
            self._noticed,
            -1 if resume is None else resume.step,
            {} if resume is None else {self.rank: resume.told(self.transport.live)},
            self.failures.in_vain,
            {self.rank: why} if why else {},
            {self.rank: self._refusal} if self._refusal else {},
        )

    def _end_if_all_must(self, agreed: Ledger) -> None:
        """Raise what ends the run, the same on all ranks: what one refuses, or LostTouch."""
        if agreed.refusals:
            speaker, problem = min(agreed.refusals.items())
            error = UsageError(problem)
            error.speaker = speaker
            raise error
        self.failures.check(agreed.in_vain, agreed.why_in_words)

    def _return_to_commit(self, agreed: Ledger) -> None:
        """Take the last commit and the newest view of all survivors, who have `agreed`; undo what is past that commit."""
        self.stopping, self.doubted, self._noticed = agreed.asks, agreed.doubts, agreed.noticed
        if agreed.state_lost:
            raise Unrecoverable("a rank died while all were rolling back")
        commits, begun = agreed.commits, agreed.begun
        # deaths: _take_over
        if begun and not self.protection.keeps_deltas and self.view.live == self.transport.live:
            raise Unrecoverable(
                f"ranks lost touch with each other, none of them died: protection {self.protection.name} cannot take back "
                f"the updates since step {self.committed}"
            )
        if commits > self._commits:
            assert commits == self._commits + 1, (
                f"rank {self.rank} has {self._commits} commits, another {commits}"
            )
            self._accept_commit()
            self._hooks.committed()
        elif self._policy.skip_undo:
            self._accept_commit_without_undo()
        else:
            self._undo()
        if agreed.view.epoch > self.view.epoch:
            self.view = agreed.view
        self.step = self.committed
        self._updating = self._changed = False

    def _accept_commit_without_undo(self) -> None:
        """The test-only wrong way: keep uncommitted updates and forget how to take them back."""
        committed, commits, self._reshape = self.committed, self._commits, None
        self._accept_commit()
        self.committed, self._commits = committed, commits

    def _take_over(self) -> None:
        """Adopt the next view: host its shards, empty at first."""
        dead = [rank for rank in self.view.live if rank not in self.transport.live]
        if dead and not self.protection.keeps_deltas:
            raise Unrecoverable(f"{named('rank', dead)} died: {self.protection.after_deaths}")
        if dead:
            protection = self.protection
            protection.check_losses(
                self.view, dead, self._lost_since_commit(self.transport.live), self.committed
            )
            self.view = plan_recovery(
                self.view,
                dead,
                protection.shape,
                self._policy.dense_replicas,
                protection.in_words,
                protection.any_shards_may_be_lost,
                protection.rebuilding_may_move,
            )
        self._host_shards(missing=True)
        self.protection.adopt(self.view)

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
            self._durable,
            self.transport,
            (self._commits, self.view, shape),
            self.stores,
            self._context,
            self.protection,
            self._policy.dense_replicas,
        )
        self.step = self.committed = loaded.step
        self._commits = loaded.commits
        self._adopt(loaded)
        self._ahead = self._reshape = self._repaired = None
        self.rebuild_left, self._reshape_considered, self._put_right, self._updating = (
            {},
            -1,
            False,
            False,
        )
        self.dense, self.log = None, StepLog()
        if self.rank in self.view.dense:
            self._load_dense(loaded.dense)
        self.rollbacks += 1
        if told:
            self._hooks.event(
                rolled_back_event(self.step, self.view, begun, str(why), self._clock() - began)
            )

    @property
    def _redone(self) -> int:
        """Steps that were begun before the recovery that is through, and are undone."""
        return max(self._noticed.begun - self.committed, 0)

    def _record_failure(self, dead: tuple[int, ...], before: View, began: float) -> None:
        shards = tuple(shard for shard, host in enumerate(before.shards) if host in dead)
        slots = tuple(slot for slot, host in enumerate(before.slots) if host in dead)
        failure = Failure(
            ranks=dead,
            step=self._noticed.step,
            phase=self._noticed.phase,
            redone_steps=self._redone,
            noticed_at=began,
            recovery_seconds=self._clock() - began,
            shards=shards,
            slots=slots,
            rebuilt_bytes=len(shards) * self.stores.bytes_of_a_shard(self.layouts),
        )
        self.failures.failures.append(failure)
        self._hooks.event(
            failure_event(
                failure,
                before,
                self.view,
                self.committed,
                self.failures_left,
                self.failures_left_when_rebuilt,
            )
        )


def _seen_here(failure: PeerFailure) -> str:
    """What failed, as this rank has seen it; empty where it only heard of a recovery."""
    return "" if isinstance(failure, Revoked) else str(failure)

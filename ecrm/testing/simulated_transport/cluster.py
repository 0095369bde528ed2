"""Many ranks in a single process, from a single seed: deaths anywhere, repeatable by the seed.

The simulation may do everything allowed by `base.Transport`, more than ULFM was seen to do:

- A call during or after a rank's death ends at each survivor separately: with the result if all
  needed data is with the rank, with `PeerFailure`, or not before another rank shrinks.
- `agree` may return True on some ranks and raise `PeerFailure` on others; never True beside False.
- `shrink` drops the dead, but a rank that died inside `shrink` may stay in `live` and be found by
  the next call.
- A rank leaves when its program ends. After an earlier death the leave is a further death to the
  others; without a death no rank may wait for the left rank, and a wait is reported as a deadlock.
- A rank is dead to the others when its program raises.
- A dead rank may come back: the rank waits until a shrink of all members admits newcomers, and runs
  the program again. Members may learn late of ranks that wait. A waiting rank ends with the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from random import Random
from typing import Any

import torch

from ecrm.testing.simulated_transport.baton import Baton
from ecrm.testing.simulated_transport.communicator import SHRINK, Call, CallMismatch, Communicator
from ecrm.testing.simulated_transport.fault_plan import (
    BEFORE,
    DURING,
    Fault,
    FaultPlan,
    PhaseFault,
    RandomFaults,
)
from ecrm.testing.simulated_transport.outcome import (
    Event,
    Kill,
    Outcome,
    ProgramFailed,
    RankKilled,
    Result,
    SimulationDeadlock,
    SimulationError,
    SimulationMismatch,
    SimulationTooLong,
)
from ecrm.testing.simulated_transport.transport import SimulatedTransport
from ecrm.transport.base import PeerFailure, Revoked, Transport
from ecrm.transport.membership import Admit


class Member:
    """The cluster's state of a rank."""

    __slots__ = (
        "call",
        "call_index",
        "calls_since_shrink",
        "communicator",
        "dead",
        "gone",
        "method",
        "rank",
        "returns_at",
        "told",
        "waiting",
    )

    def __init__(self, rank: int, communicator: Communicator) -> None:
        self.rank = rank
        self.communicator = communicator
        self.call_index = -1
        self.method = "start"
        self.call: Call | None = None  # the awaited call, unless a shrink
        self.calls_since_shrink = -1
        self.waiting = False
        self.told = False  # of a death, because all ranks waited
        self.gone = False  # killed, failed, or ended
        self.dead = False  # killed
        self.returns_at = -1  # the number of calls of all ranks from which on the rank may join


class SimulatedCluster:
    """A world of `world_size` ranks that runs a single program, once.

    seed: draws everything: the next runner, the news of every rank and their time, and random
    faults. faults: given faults, or `RandomFaults`. on_phase: called as (rank, step, phase) by
    `enter_phase`; raises `RankKilled` to kill the rank at the phase. on_return: called as (rank)
    when a dead rank has joined. most_calls: the run ends with `SimulationTooLong` when all ranks
    together have made more calls.
    """

    def __init__(
        self,
        world_size: int,
        seed: int | str,
        faults: RandomFaults | Iterable[Fault | PhaseFault] = (),
        *,
        on_phase: Callable[[int, int, str], None] | None = None,
        on_return: Callable[[int], None] = lambda rank: None,
        most_calls: int = 1_000_000,
    ) -> None:
        self._random = Random(seed)
        # Chances drawn once a run, to make runs differ in kind: to complete a call rather than fail
        # if both are possible; to learn of a death at once; to stay in `live` after a death inside
        # a shrink.
        self._completes = self._random.uniform(0.05, 0.95)
        self._notices = self._random.uniform(0.05, 0.95)
        self._stays = self._random.choice((0.0, 0.5, 1.0))
        self._plan = FaultPlan(faults, self._random)
        self._on_phase, self._on_return = on_phase, on_return
        self._most_calls = most_calls
        world = Communicator(tuple(range(world_size)))
        self._members = [Member(rank, world) for rank in range(world_size)]
        self._baton = Baton(world_size, self._random, self._when_all_wait)
        self._started = False
        self._broken: SimulationError | None = None
        self._results: dict[int, Any] = {}
        self._errors: dict[int, BaseException] = {}
        self._killed: list[Kill] = []
        self.killed_ranks: tuple[int, ...] = ()
        self._calls = 0
        self._trace: list[Event] = []

    @property
    def mix(self) -> Counter[str]:
        """The number of drawn faults by kind."""
        return self._plan.mix

    def run(self, program: Callable[[Transport], Result]) -> Outcome[Result]:
        """Run `program(transport)` on every rank; return when all programs have ended.

        Raises ProgramFailed when programs raised, and another SimulationError when the run broke
        off.
        """
        if self._started:
            raise RuntimeError("a simulated cluster runs one program, once")
        self._started = True
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # else every rank's thread starts its own team
        try:
            self._baton.run(lambda rank: self._run_rank(self._members[rank], program))
        finally:
            torch.set_num_threads(threads)
        if self._broken is not None:
            raise self._broken
        outcome = Outcome(self._results, self._killed, self._calls, self._trace, self._plan.unfired)
        if self._errors:
            raise ProgramFailed(outcome, self._errors)
        return outcome

    def enter_phase(self, rank: int, step: int, phase: str) -> None:
        """The program's phase hook: kill the rank here if a fault or `on_phase` says so."""
        member = self._members[rank]
        self._stop_if_gone(member)
        if self._plan.at_phase(rank, step, phase):
            self._die(member, f"{phase} of step {step}")
        if self._on_phase is not None:
            try:
                self._on_phase(rank, step, phase)
            except RankKilled:
                self._die(member, f"{phase} of step {step}")

    def tell(self, rank: int, what: str) -> None:
        """Add an act of a rank's program to the trace."""
        self._note(self._members[rank], what)

    def _run_rank(self, member: Member, program: Callable[[Transport], object]) -> None:
        self._live(member, program, joined=False)
        while self._returns(member):
            self._live(member, program, joined=True)

    def _returns(self, member: Member) -> bool:
        """Whether a dead rank comes back; waits until the rank is admitted, or all have ended."""
        delay = self._plan.returns() if member.dead and self._broken is None else None
        if delay is None:
            return False
        member.returns_at = self._calls + delay
        member.call, member.told = None, False
        self._note(member, "waits to join")
        while member.dead and self._broken is None and any(not m.gone for m in self._members):
            member.waiting = True
            self._baton.wait(member.rank)
            member.waiting = False
        return not member.dead

    def _live(self, member: Member, program: Callable[[Transport], object], joined: bool) -> None:
        try:
            self._stop_if_gone(member)
            self._results[member.rank] = program(self._transport_of(member, joined))
            self.leave(member.rank)
        except RankKilled:
            if not member.gone and self._broken is None:
                self._bury(member, "by its program")
        except BaseException as error:
            self._errors[member.rank] = error
            self._note(member, f"raises {type(error).__name__}")
            member.gone = True
            self._mourn(member)

    def _transport_of(self, member: Member, joined: bool) -> Transport:
        return SimulatedTransport(self, member.rank, joined)

    # Called by a transport, in the thread of its rank.

    def live(self, rank: int) -> tuple[int, ...]:
        return self._members[rank].communicator.members

    def collective(self, rank: int, method: str, contribution: object) -> dict[int, object]:
        """Take part in a call; return the contribution of every member. Raises PeerFailure."""
        member = self._members[rank]
        when = self._begin(member, method)
        communicator = member.communicator
        if communicator.revoked and method != "agree":
            self._note(member, "refused")
            self._die_if(member, when)
            raise Revoked(f"{method}: another rank is recovering from a failure")
        member.call = call = self._enter(member, method, contribution)
        if when == DURING:
            self._lose_part(member)
            self._wake_if_over(member)
            self._die(member, DURING)
        member.waiting = True
        self._wake_if_over(member)
        completed = None
        while completed is None:
            self._wait(member)
            completed = self._end_of(member, call)
        member.call = None
        member.told = False
        if completed and method != "agree" and self._plan.loses_touch():
            self._note(member, "loses touch")
            self._die_if(member, when)
            raise PeerFailure(f"{method}: lost touch with ranks {communicator.members}")
        self._note(member, "completes" if completed else "fails")
        self._die_if(member, when)
        if not completed and not communicator.dead:
            raise Revoked(f"{method}: another rank is recovering from a failure")
        if not completed:
            raise PeerFailure(
                f"{method}: of ranks {communicator.members} {sorted(communicator.dead)} died"
            )
        return call.contributions

    def newcomers_wait(self, rank: int) -> bool:
        """Whether dead ranks wait to join; the news reach a rank late."""
        members = self._members[rank].communicator.members
        return bool(self._newcomers(members)) and self._random.random() < self._notices

    def _newcomers(self, members: Collection[int]) -> list[Member]:
        """Ranks that wait to join, and are not of the communicator of `members`."""
        return [
            each
            for each in self._members
            if each.dead and 0 <= each.returns_at <= self._calls and each.rank not in members
        ]

    def shrink(self, rank: int, admit: Admit) -> None:
        """Revoke, wait for all live ranks, move the live ranks to a new communicator.

        Ranks that wait join the new communicator if survivors want so: see `Transport.shrink`.
        """
        member = self._members[rank]
        when = self._begin(member, SHRINK)
        communicator = member.communicator
        communicator.shrinking.add(rank)
        communicator.admitting[rank] = admit
        self._wake_all(communicator)
        if when == DURING:
            self._die(member, DURING)
        member.waiting = True
        self._end_shrink_if_all_are_in(communicator)
        while True:  # the last to enter waits too, for its turn
            self._wait(member)
            if member.communicator is not communicator:
                break
        self._note(member, f"live are {member.communicator.members}")
        self._die_if(member, when)

    def leave(self, rank: int) -> None:
        """End the calls of a rank."""
        member = self._members[rank]
        if not member.gone:
            self._stop_if_gone(member)
            member.gone = True
            self._note(member, "leaves")
            member.communicator.left.add(rank)
            self._wake_all(member.communicator)
            self._end_shrink_if_all_are_in(member.communicator)

    # Calls.

    def _begin(self, member: Member, method: str) -> str | None:
        """Count a call; return the moment of the rank's death, if any. BEFORE kills at once."""
        self._stop_if_gone(member)
        self._calls += 1
        member.call_index += 1
        member.method = method
        if method == SHRINK:
            member.calls_since_shrink = 0
        elif member.calls_since_shrink >= 0:
            member.calls_since_shrink += 1
        if self._calls > self._most_calls:
            self._break_off(SimulationTooLong, f"more than {self._most_calls} calls")
            raise RankKilled
        self._note(member, "enters")
        when = self._plan.at_call(
            member.rank, member.call_index, member.calls_since_shrink, self.killed_ranks
        )
        if when == BEFORE:
            self._die(member, BEFORE)
        return when

    def _enter(self, member: Member, method: str, contribution: object) -> Call:
        try:
            return member.communicator.enter(member.rank, method, contribution)
        except CallMismatch as error:
            self._break_off(SimulationMismatch, str(error))
            raise RankKilled from None

    def _end_of(self, member: Member, call: Call) -> bool | None:
        """Whether the call completes (True) or fails (False) at this rank; `None` to wait on."""
        communicator = member.communicator
        has_all = communicator.has_all(member.rank, call)
        if not communicator.troubled:
            return True if has_all else None
        if has_all:
            return self._random.random() < self._completes
        if communicator.revoked or member.told or self._random.random() < self._notices:
            return False
        return None

    def _end_shrink_if_all_are_in(self, communicator: Communicator) -> None:
        if not communicator.revoked or not communicator.all_shrinking():
            return
        died_inside = sorted(communicator.shrinking & communicator.dead)
        staying = [rank for rank in died_inside if self._random.random() < self._stays]
        living = communicator.shrinking - communicator.dead
        wishes = {communicator.admitting.get(rank, Admit.NO) for rank in living}
        admits = Admit.NO not in wishes and Admit.ASKS in wishes
        newcomers = self._newcomers(communicator.members) if admits else []
        survivors = communicator.after_shrink(staying, [each.rank for each in newcomers])
        for each in newcomers:
            each.dead = each.gone = False
            each.returns_at, each.communicator, each.calls_since_shrink = -1, survivors, 0
            self._note(each, f"joins {survivors.members}")
            self._on_return(each.rank)
            self._wake(each)
        for rank in living:
            self._members[rank].communicator = survivors
            self._wake(self._members[rank])

    # Waiting and waking.

    def _wait(self, member: Member) -> None:
        member.waiting = True
        self._baton.wait(member.rank)
        member.waiting = False
        self._stop_if_gone(member)

    def _wake(self, member: Member) -> None:
        if member.waiting:
            self._baton.make_ready(member.rank)

    def _wake_all(self, communicator: Communicator) -> None:
        for rank in communicator.members:
            member = self._members[rank]
            if member.communicator is communicator:
                self._wake(member)

    def _wake_if_over(self, member: Member) -> None:
        """Wake ranks after `member` has entered its call."""
        assert member.call is not None
        if member.communicator.is_full(member.call):
            self._wake_all(member.communicator)
        elif member.communicator.troubled:
            self._wake(member)

    def _when_all_wait(self) -> None:
        """Let a waiting rank learn of a death; without such a rank end the run as a deadlock."""
        deaf = [
            member
            for member in self._members
            if member.waiting and member.call and member.communicator.troubled
        ]
        if deaf:
            member = self._random.choice(deaf)
            member.told = True
            self._wake(member)
            return
        # only ranks that wait to join are left: a run that has ended admits no rank
        waiting = [member for member in self._members if member.dead and member.waiting]
        if waiting and all(member.gone for member in self._members):
            for member in waiting:
                self._wake(member)
            return
        waits = [
            f"rank {member.rank} waits in {member.method} (its call {member.call_index}) "
            f"with {member.communicator.members}, "
            f"of whom {sorted(member.communicator.left)} have ended"
            for member in self._members
            if member.waiting
        ]
        self._break_off(SimulationDeadlock, "nobody can go on: " + "; ".join(waits))

    def _break_off(self, kind: type[SimulationError], message: str) -> None:
        self._broken = kind(message, self._trace)
        for member in self._members:
            self._wake(member)

    def _stop_if_gone(self, member: Member) -> None:
        if self._broken is not None or member.dead:
            raise RankKilled
        if member.gone:
            raise RuntimeError(f"rank {member.rank} has closed its transport")

    # Dying.

    def _die_if(self, member: Member, when: str | None) -> None:
        if when is not None:
            self._die(member, when)

    def _die(self, member: Member, when: str) -> None:
        """Kill the running rank, and perhaps other ranks too."""
        self._bury(member, when)
        while True:
            others = [other.rank for other in self._members if not other.gone]
            rank = self._plan.taken_along(others, self.killed_ranks)
            if rank is None:
                raise RankKilled
            self._kill_where_it_is(self._members[rank])

    def _kill_where_it_is(self, member: Member) -> None:
        """Kill a rank that is not running: waiting in a call, or not yet begun."""
        if member.call is not None:
            self._lose_part(member)
        self._bury(member, DURING)
        self._baton.make_ready(member.rank)  # to unwind its thread

    def _lose_part(self, member: Member) -> None:
        """Draw the receivers reached by the dying rank's part of the call."""
        assert member.call is not None
        others = member.communicator.members
        member.call.reached[member.rank] = {rank for rank in others if self._random.random() < 0.5}

    def _bury(self, member: Member, when: str) -> None:
        self._note(member, f"killed {when}")
        self._killed.append(Kill(member.rank, member.call_index, member.method, when))
        self.killed_ranks += (member.rank,)
        member.gone = member.dead = True
        member.waiting = False
        self._mourn(member)

    def _mourn(self, member: Member) -> None:
        communicator = member.communicator
        communicator.dead.add(member.rank)
        self._wake_all(communicator)
        self._end_shrink_if_all_are_in(communicator)

    def _note(self, member: Member, what: str) -> None:
        self._trace.append(Event(member.rank, member.call_index, member.method, what))

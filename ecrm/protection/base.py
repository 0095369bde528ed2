"""The interface of a protection: what the engine asks of whatever keeps rows from being lost.

The engine owns the step and the shards; a protection sees deltas, commits and views, never the
dense model. `none` implements it by doing nothing, `erasure` with Reed-Solomon parity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ecrm.base.allocate import Allocate
from ecrm.base.wording import counted
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View, failures_left
from ecrm.protection.context import ProtectionContext
from ecrm.protection.scrub import Scrub, ScrubReport
from ecrm.requests.routing import ShardRequests, SlotRequests
from ecrm.requests.stand_in import StandIn
from ecrm.storage.hosted import ShardSpace
from ecrm.storage.undo import Deltas
from ecrm.transport.message import Part, Received
from ecrm.transport.piggyback import Rounds


@dataclass(frozen=True)
class RepairReport:
    """State of every rebuilding shard before a round of repair, the same on every rank.

    `left`: rows, data and redundancy, still missing, by shard; 0 means that the shard is whole.
    `on_demand`: rows decoded so far because a step asked for them, by shard.
    """

    left: dict[int, int]
    on_demand: dict[int, int]


@dataclass(frozen=True)
class VerifyReport:
    """Stripes checked against their parity on this rank, and how many did not match."""

    stripes: int = 0
    mismatches: int = 0


class RepairRound(ABC):
    """A round of repair that has begun on every live rank; its messages can travel with others.

    `report` and `urgent`, whether slots of any rank wait for rows of this round, are known once
    `receive_requests` is through; `report` is as of the beginning. A round that is not finished has
    changed nothing.
    """

    report: RepairReport
    urgent: bool

    @abstractmethod
    def requests(self) -> dict[int, list[Part]]:
        """What this rank asks of others: pairs of a head, REPAIR first, and a tensor."""

    @abstractmethod
    def receive_requests(self, requests: Mapping[int, Sequence[Received]]) -> None:
        """What others ask of this rank."""

    @abstractmethod
    def answers(self) -> dict[int, list[Part]]:
        """At a commit: what it tells others of the rows that are wanted.

        Nothing on any rank where the round is not `urgent`.
        """

    @abstractmethod
    def rest(self) -> dict[int, list[Part]]:
        """At the same commit: what it tells them of all others."""

    @abstractmethod
    def finish(self, answers: Mapping[int, Sequence[Received]]) -> None:
        """Recover rows from what they tell, in `answers`, in `rest` or in both."""


class Protection(ABC):
    """Keeps what lost rows are recovered from. Every live rank calls the collective methods.

    - `shape`: the stripes that it lays rows out in.
    - `keeps_deltas`: whether updates produce deltas. Without them no step can be taken back, and
      any failure ends the run.
    - `redundancy_bytes`, `log_bytes`: memory held on this rank.
    - `any_shards_may_be_lost`: whether shards come back without each other, so that a dense replica
      is all that must be left.
    - `rebuilding_may_move`: whether what has been rebuilt of a shard can be given up again.
    - `exact`: whether the finished model is that of an undisturbed run, whatever is survived.
    - `stand_in`: what answers for lost shards until they are whole, None where they do themselves.
    - `foresees_repair`: whether `foresee_repair` can begin the first round of repair after a loss.
    - `rebuilding_makes_whole`: whether all redundancy is there once lost shards are, and not only
      after the next step.
    - `redundancy`: what `verify` compares with the rows, in words, empty for nothing.
    """

    name: str
    shape: StripeShape
    keeps_deltas: bool
    any_shards_may_be_lost = False
    rebuilding_may_move = True
    exact = True
    stand_in: StandIn | None = None
    foresees_repair = False
    rebuilding_makes_whole = True
    redundancy = ""

    @property
    def dense_replicas(self) -> int:
        """Failure domains to hold the dense replica: one more than may be lost at once."""
        return self.shape.m + 1

    @property
    def repairs_ahead(self) -> bool:
        """Whether `begin_repair` can begin the next round of repair; the same on all ranks."""
        return False

    @property
    def in_words(self) -> str:
        """Its name and numbers, as messages have them."""
        return f"protection {self.name}"

    @property
    def after_deaths(self) -> str:
        """What becomes of rows after deaths where updates leave no deltas, as messages have it."""
        return f"protection {self.name} cannot bring anything back"

    def verified_in_words(self, report: VerifyReport) -> str:
        """What `verify` has found, over all ranks, in one line."""
        stripes = counted(report.stripes, "stripe")
        return f"parity: {stripes} encoded again, {report.mismatches:,} wrong"

    @property
    def written_bytes(self) -> int:
        """Bytes that this rank has written to files so far."""
        return 0

    @property
    @abstractmethod
    def redundancy_bytes(self) -> int: ...

    @property
    @abstractmethod
    def log_bytes(self) -> int: ...

    @property
    def memory(self) -> Sequence[Tensor]:
        """The live tensors of the redundancy held on this rank."""
        return ()

    @abstractmethod
    def with_shape(self, shape: StripeShape) -> Protection:
        """The same protection over other stripes, not started."""

    @abstractmethod
    def start(self, context: ProtectionContext, view: View) -> None:
        """Set up for the undisturbed start, when every record is zeros."""

    @abstractmethod
    def adopt(self, view: View) -> None:
        """Take on what this rank hosts in a new view; of new shards everything is missing."""

    def allocator(self, shard: int, space: int) -> Allocate | None:
        """What gives the rows of a shard hosted here their memory; None for plain memory."""
        return None

    @abstractmethod
    def protect(
        self, deltas: dict[ShardSpace, Deltas], view: View, ahead: ShardRequests | None = None
    ) -> Rounds:
        """Bring redundancy up to date with the deltas of each hosted shard since the commit.

        The caller makes the exchanges that this asks for (`exchange_rounds`), on all ranks.
        `ahead` is what slots ask of these shards for the next step, and are sent with this; None
        where they do not look ahead, or may be sent some of it later.
        """

    def retain(self, asked: SlotRequests, replies: Mapping[int, Sequence[Received]]) -> None:
        """After a `protect` with `ahead`: keep the next rows that this rank's slots were sent."""
        return None

    def prepare(self, step: int, dense: Callable[[], list[Tensor]] | None) -> None:
        """Before the agreement on a commit: all rows are complete as of `step`.

        So is the `dense` state, which this gives on ranks that hold one.
        """
        return None

    @abstractmethod
    def committed(self) -> None:
        """The deltas of the last `protect` can no longer be taken back: forget how to undo them."""

    @abstractmethod
    def undo(self) -> None:
        """Take back every `protect` since the last commit; calling it again changes nothing."""

    @abstractmethod
    def repair(self, wanted: dict[ShardSpace, Tensor], budget: int, view: View) -> RepairReport:
        """Collective, at a commit, while shards are rebuilding: recover missing rows.

        `wanted` are missing local rows that the step asks for, all recovered on return; where they
        are fewer than `budget` per hosted shard, others are recovered in the background. With a
        `stand_in` this comes before slots ask for rows: what is whole on return answers for itself
        in this very step.
        """

    def begin_repair(
        self,
        wanted: dict[ShardSpace, Tensor],
        soon: dict[ShardSpace, Tensor],
        budget: int,
        view: View,
    ) -> RepairRound:
        """While shards are rebuilding, after a step's updates: begin what `repair` does.

        It is answered at the commit and finished before the next step's updates. `soon` are missing
        local rows that the next step updates, or that the one after it asks for. They are recovered
        as well, but nobody waits for them.
        """
        raise AssertionError(f"protection {self.name} begins no repair ahead")

    def foresee_repair(self, soon: dict[ShardSpace, Tensor], view: View) -> RepairRound:
        """At a commit, nothing back yet of rebuilding shards: `begin_repair` without requests.

        Every rank knows all rows that are wanted `soon`, unique int64, of whichever shard. The
        round is ready to be answered.
        """
        raise AssertionError(f"protection {self.name} foresees no repair")

    def failures_left(self, view: View, shape: StripeShape, gone: int) -> int:
        """How many more failure domains may be lost at once, whichever they are.

        In `view`, over stripes of `shape`, without anything being lost for good. `gone` were lost
        since the last commit of a step.
        """
        return failures_left(view, shape, self.any_shards_may_be_lost) if self.keeps_deltas else 0

    def check_losses(self, view: View, dead: Sequence[int], gone: int, step: int) -> None:
        """Raise Unrecoverable where the `dead` ranks of `view` are too many.

        This is for reasons that stripes do not show. `gone` failure domains, these included, were
        lost since `step`, the last commit of a step.
        """
        return None

    def accounts(self, shards: Sequence[int]) -> list[dict[str, Any]]:
        """After `committed`: what did not come back of `shards`, which are whole from now on.

        The same on every rank; empty where everything came back.
        """
        return []

    @abstractmethod
    def verify(self, view: View) -> VerifyReport:
        """Collective, at a commit, nothing rebuilding: compare redundancy here with the rows."""

    def make_scrub(self, rows_per_step: int, report: ScrubReport | None = None) -> Scrub | None:
        """After `start`: what compares redundancy with rows while training goes on.

        It adds to `report`. None for 0 rows, and without redundancy.
        """
        return None

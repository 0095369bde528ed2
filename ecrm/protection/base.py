"""The interface between the engine and a protection, the code that keeps rows from being lost.

The engine owns the step and the shards; a protection sees deltas, commits and views, never the
dense model. `none` implements the interface by doing nothing, `erasure` with Reed-Solomon parity.
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
from ecrm.protection.kinds import Kind
from ecrm.protection.routing import ShardRequests, SlotRequests
from ecrm.protection.scrub import Scrub, ScrubReport
from ecrm.protection.stand_in import StandIn
from ecrm.storage.hosted import ShardSpace
from ecrm.storage.undo import Deltas
from ecrm.transport.message import Part, Received
from ecrm.transport.piggyback import Rounds


@dataclass(frozen=True)
class RepairReport:
    """State of every rebuilding shard at a round of repair, the same on every rank.

    Taken before the round decodes rows; under `stateless`, after the round has restored rows.

    `left`: rows, data and redundancy, still missing, by shard; 0 means a whole shard.
    `on_demand`: rows decoded so far at the demand of a step, by shard.
    """

    left: dict[int, int]
    on_demand: dict[int, int]


@dataclass(frozen=True)
class VerifyReport:
    """Number of stripes compared with parity on the calling rank, and number of mismatches."""

    stripes: int = 0
    mismatches: int = 0


class RepairRound(ABC):
    """A round of repair, begun on every live rank. Other messages can carry the round's messages.

    `urgent`: whether slots of any rank wait for rows of the round. `report` and `urgent` are known
    after `receive_requests`; `report` is as of the beginning. An unfinished round has changed
    nothing. Some rows may come with the redundancy of the next `protect`.
    """

    report: RepairReport
    urgent: bool

    @abstractmethod
    def requests(self) -> dict[int, list[Part]]:
        """Messages by receiving rank: pairs of a head, REPAIR first, and a tensor."""

    @abstractmethod
    def receive_requests(self, requests: Mapping[int, Sequence[Received]]) -> None:
        """Take the `requests` of all ranks, by sender."""

    @abstractmethod
    def answers(self) -> dict[int, list[Part]]:
        """At a commit: the messages about wanted rows, by receiving rank.

        Empty on every rank unless the round is `urgent`.
        """

    @abstractmethod
    def rest(self) -> dict[int, list[Part]]:
        """At the same commit: the messages about all remaining rows, by receiving rank."""

    @abstractmethod
    def finish(self, answers: Mapping[int, Sequence[Received]]) -> None:
        """Recover rows from received messages, made by `answers`, by `rest` or by the two."""


class Protection(ABC):
    """Keeps the redundancy for lost rows. Every live rank calls the collective methods.

    - `kind`: the facts known from a config.
    - `shape`: the stripes of the row layout.
    - `redundancy_bytes`, `log_bytes`: memory held on the calling rank.
    - `any_shards_may_be_lost`: whether a lost shard comes back without the remaining shards, so
      only a dense replica must be left.
    - `rebuilding_may_move`: whether a rebuilding shard may move to another rank, giving up the
      rows rebuilt so far.
    - `stand_in`: answers for lost shards until the shards are whole; `None` if rebuilding
      shards answer for themselves.
    - `foresees_repair`: whether `foresee_repair` can begin the first round of repair after a loss.
    - `rebuilding_makes_whole`: whether all redundancy is back as soon as the lost shards are whole;
      otherwise the next step brings the rest.
    - `redundancy`: the redundancy that `verify` compares with the rows, in words; empty for none.
    """

    kind: Kind
    shape: StripeShape
    any_shards_may_be_lost = False
    rebuilding_may_move = True
    stand_in: StandIn | None = None
    foresees_repair = False
    rebuilding_makes_whole = True
    redundancy = ""

    @property
    def name(self) -> str:
        """The name in a config."""
        return self.kind.name

    @property
    def keeps_deltas(self) -> bool:
        """See `Kind`."""
        return self.kind.keeps_deltas

    @property
    def exact(self) -> bool:
        """See `Kind`."""
        return self.kind.exact

    @property
    def dense_replicas(self) -> int:
        """Number of failure domains with a dense replica: 1 more than may be lost at once."""
        return self.shape.m + 1

    @property
    def repairs_ahead(self) -> bool:
        """Whether `begin_repair` can begin the next round of repair; equal on all ranks."""
        return False

    @property
    def in_words(self) -> str:
        """Name and numbers of the protection, for messages."""
        return f"protection {self.name}"

    @property
    def after_deaths(self) -> str:
        """For messages, if updates leave no deltas: the fate of the rows after deaths."""
        return f"protection {self.name} cannot bring anything back"

    def verified_in_words(self, report: VerifyReport) -> str:
        """The findings of `verify`, summed over all ranks, in a line."""
        stripes = counted(report.stripes, "stripe")
        return f"parity: {stripes} encoded again, {report.mismatches:,} wrong"

    @property
    def written_bytes(self) -> int:
        """Bytes written to files by the calling rank so far."""
        return 0

    @property
    @abstractmethod
    def redundancy_bytes(self) -> int: ...

    @property
    @abstractmethod
    def log_bytes(self) -> int: ...

    @property
    def memory(self) -> Sequence[Tensor]:
        """The live tensors of the redundancy held on the calling rank."""
        return ()

    @abstractmethod
    def with_shape(self, shape: StripeShape) -> Protection:
        """A new protection of the same kind over `shape`, not started."""

    @abstractmethod
    def start(self, context: ProtectionContext, view: View) -> None:
        """Set up for the undisturbed start: every record is zeros."""

    @abstractmethod
    def adopt(self, view: View) -> None:
        """Take on the rank's shards in a new view; all rows of newly hosted shards are missing."""

    def allocator(self, shard: int, space: int) -> Allocate | None:
        """The allocator of memory for the rows of a hosted shard; `None` for plain memory."""
        return None

    @abstractmethod
    def protect(
        self, deltas: dict[ShardSpace, Deltas], view: View, ahead: ShardRequests | None = None
    ) -> Rounds:
        """Bring redundancy up to date with the deltas of every hosted shard since the commit.

        The caller makes the yielded exchanges on all ranks (`exchange_rounds`). `ahead` is the
        slots' requests to the hosted shards for the next step; the requested rows are sent along.
        `None` without look-ahead, or if some requested rows may be sent later.
        """

    def retain(self, asked: SlotRequests, replies: Mapping[int, Sequence[Received]]) -> None:
        """After a `protect` with `ahead`: keep the next step's rows sent to the rank's slots."""
        return None

    def prepare(self, step: int, dense: Callable[[], list[Tensor]] | None) -> None:
        """Before the agreement on a commit: all rows are complete as of `step`.

        `dense` returns the dense state, complete as of `step` too; `None` on ranks without a
        dense replica.
        """
        return None

    @abstractmethod
    def committed(self) -> None:
        """The deltas of the last `protect` are final: forget how to undo the deltas."""

    @abstractmethod
    def undo(self) -> None:
        """Take back every `protect` since the last commit; a second call changes nothing."""

    @abstractmethod
    def repair(self, wanted: dict[ShardSpace, Tensor], budget: int, view: View) -> RepairReport:
        """Collective, at a commit, while shards are rebuilding: recover missing rows.

        `wanted` are missing local rows asked for by the step, all recovered on return. If fewer
        than `budget` rows per hosted shard are wanted, further rows are recovered in the
        background. With a `stand_in` the call comes before slots ask for rows: a shard made whole
        by the call answers for itself in the same step.
        """

    def begin_repair(
        self,
        wanted: dict[ShardSpace, Tensor],
        soon: dict[ShardSpace, Tensor],
        budget: int,
        view: View,
    ) -> RepairRound:
        """While shards are rebuilding, after a step's updates: begin a round as of `repair`.

        The round is answered at the commit and finished before the next step's updates. `soon` are
        missing local rows to be updated by the next step or asked for by the step after the next.
        The round recovers `soon` rows too, but no slot waits for `soon` rows. Further rows may come
        with the next `protect`, since no step asks for them meanwhile.
        """
        raise AssertionError(f"protection {self.name} begins no repair ahead")

    def foresee_repair(self, soon: dict[ShardSpace, Tensor], view: View) -> RepairRound:
        """At a commit, before any row of the rebuilding shards is back: begin without requests.

        `soon` are all rows wanted soon, unique int64, of every shard, the same on every rank. The
        returned round is ready to be answered.
        """
        raise AssertionError(f"protection {self.name} foresees no repair")

    def failures_left(self, view: View, shape: StripeShape, gone: int) -> int:
        """Number of further failure domains, any of them, that may be lost at once.

        For `view`, over stripes of `shape`, with nothing lost for good. `gone` domains were lost
        since the last commit of a step.
        """
        return failures_left(view, shape, self.any_shards_may_be_lost) if self.keeps_deltas else 0

    def check_losses(self, view: View, dead: Sequence[int], gone: int, step: int) -> None:
        """Raise Unrecoverable if the `dead` ranks of `view` are too many.

        Only for reasons beyond the stripes. `gone` failure domains, with the domains of the `dead`
        ranks, were lost since `step`, the last commit of a step.
        """
        return None

    def accounts(self, shards: Sequence[int]) -> list[dict[str, Any]]:
        """After `committed`: an account of the losses for each of `shards`, whole from now on.

        Equal on every rank; empty if everything came back.
        """
        return []

    @abstractmethod
    def verify(self, view: View) -> VerifyReport:
        """Collective, at a commit, nothing rebuilding: compare redundancy with the rows."""

    def make_scrub(self, rows_per_step: int, report: ScrubReport | None = None) -> Scrub | None:
        """After `start`: the scrub, comparing redundancy with rows while training goes on.

        The scrub adds to `report`. `None` for 0 rows per step, and without redundancy.
        """
        return None

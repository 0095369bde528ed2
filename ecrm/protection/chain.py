"""Chain replication: `copies` of every row and its state, kept current from head to tail.

After van Renesse and Schneider, "Chain Replication for Supporting High Throughput and Availability"
(OSDI 2004). The chain of a row is its stripe of one data unit: the head, shard s, runs the
optimizer and sends the change to shard s - 1. Shard s - 1 applies the change and sends it on, down
to the tail, shard s - (copies - 1). A commit is the tail's acknowledgement: nothing is committed
before every link has the change. A change is the XOR of the record before and after, so a link
takes an uncommitted change back by applying the change again, as parity does. A link is parity with
1 as the only coefficient.

Steps read from the head: the head has the next step's rows before the tail. After the loss of a
head, another link supplies lost rows one by one, until the new host has all rows. Then the host
fills the links lost together with the head.
"""

from __future__ import annotations

from ecrm.base.wording import counted
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View
from ecrm.protection.base import VerifyReport
from ecrm.protection.erasure import ErasureProtection
from ecrm.protection.kinds import KINDS
from ecrm.protection.routing import ShardRequests
from ecrm.storage.hosted import ShardSpace
from ecrm.storage.undo import Deltas
from ecrm.transport.message import Part, in_groups
from ecrm.transport.piggyback import Rounds

MOST_COPIES = 4
"""Most copies: up to three parity units of one data unit have coefficient 1, so equal copies."""


class ChainProtection(ErasureProtection):
    """`copies` of every row on `copies` ranks: any `copies` - 1 ranks may be lost."""

    kind = KINDS["chain"]
    redundancy = "copies of rows"

    def __init__(self, shards: int, copies: int) -> None:
        if not 2 <= copies <= MOST_COPIES:
            raise ValueError(f"a chain has 2 to {MOST_COPIES} copies, not {copies}")
        super().__init__(shards, 1, copies - 1)

    @property
    def in_words(self) -> str:
        return f"chain replication, {self.shape.m + 1} copies"

    def verified_in_words(self, report: VerifyReport) -> str:
        return f"copies: {counted(report.stripes, 'row')} compared, {report.mismatches:,} wrong"

    def with_shape(self, shape: StripeShape) -> ChainProtection:
        return ChainProtection(shape.shards, shape.m + 1)

    def protect(
        self, deltas: dict[ShardSpace, Deltas], view: View, ahead: ShardRequests | None = None
    ) -> Rounds:
        """One exchange per link after the head; a rank sends on the changes received before."""
        if self._scrub is not None:
            for (shard, space), parts in deltas.items():
                for rows, _ in parts:
                    self._scrub.used(shard, space, rows)
        # By (shard of the head, space): local rows, equal to the periods of their stripes, and
        # changes, on the rank of the last link to get the changes.
        held = dict(deltas)
        for link in reversed(range(self.shape.m)):
            outgoing: dict[int, list[Part]] = {}
            for head, space, rows, delta in (
                (*key, *part) for key in sorted(held) for part in held[key]
            ):
                if rows.numel():
                    outgoing.setdefault(view.shards[self._holder(head, link)], []).extend(
                        ((head, space), rows, delta)
                    )
            held = {}
            for tensors in (yield outgoing).values():
                for (head, space), rows, delta in in_groups(tensors, 3):
                    delta = delta.view(rows.numel(), -1)
                    held.setdefault((head, space), []).append((rows, delta))
                    local = self._context.layouts[space].local_parity(rows, link)
                    self.parity[self._holder(head, link), space].apply(local, 1, delta)

    def _holder(self, head: int, link: int) -> int:
        """Shard holding link `link`, with the tail as 0, of the rows headed by shard `head`."""
        return self.shape.shard_of_unit(self.shape.residue_of_unit(head, 0), 1 + link)

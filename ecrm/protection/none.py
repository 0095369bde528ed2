"""No redundancy: a step has no extra cost, and any failure ends the run.

Under the name `checkpoint` the protection demands checkpoints: any failure takes all ranks back to
the newest checkpoint (`ecrm/engine/rollback.py`). Only the time since the checkpoint is lost. The
finished model is the undisturbed model, bit for bit.
"""

from __future__ import annotations

from torch import Tensor

from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View
from ecrm.protection.base import Protection, RepairReport, VerifyReport
from ecrm.protection.context import ProtectionContext
from ecrm.protection.kinds import KINDS
from ecrm.protection.routing import ShardRequests
from ecrm.storage.hosted import ShardSpace
from ecrm.storage.undo import Deltas
from ecrm.transport.piggyback import Rounds


class NoProtection(Protection):
    """Every row on a single shard, without redundancy."""

    kind = KINDS["none"]

    def __init__(self, shards: int) -> None:
        self.shape = StripeShape(shards, k=1, m=0)

    @property
    def redundancy_bytes(self) -> int:
        return 0

    @property
    def log_bytes(self) -> int:
        return 0

    def with_shape(self, shape: StripeShape) -> NoProtection:
        return type(self)(shape.shards)

    def start(self, context: ProtectionContext, view: View) -> None:
        pass

    def adopt(self, view: View) -> None:
        pass

    def protect(
        self, deltas: dict[ShardSpace, Deltas], view: View, ahead: ShardRequests | None = None
    ) -> Rounds:
        yield from ()

    def committed(self) -> None:
        pass

    def undo(self) -> None:
        pass

    def repair(self, wanted: dict[ShardSpace, Tensor], budget: int, view: View) -> RepairReport:
        raise AssertionError("nothing is ever rebuilding without protection")

    def verify(self, view: View) -> VerifyReport:
        return VerifyReport()


class CheckpointProtection(NoProtection):
    """`none`, under a name that demands checkpoints."""

    kind = KINDS["checkpoint"]

    @property
    def after_deaths(self) -> str:
        return "only checkpoints have their rows"

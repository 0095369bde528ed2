"""All state loaded anew from the durable tier, after losses beyond the protection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from ecrm.engine.shard_stores import ShardStores
from ecrm.placement.stripes import RowLayout, StripeShape
from ecrm.placement.view import View
from ecrm.placement.view_change import plan_rollback
from ecrm.protection.base import Protection
from ecrm.protection.context import ProtectionContext
from ecrm.storage.hosted import HostedShard, ShardSpace
from ecrm.transport.base import Transport


class Durable(Protocol):
    """The durable tier: outlives every rank."""

    def restore(
        self,
        transport: Transport,
        layouts: Sequence[RowLayout],
        hosted: dict[ShardSpace, HostedShard],
        protection: Protection,
        view: View,
    ) -> tuple[int, list[Tensor] | None]:
        """Collective: fill shards of zeros and the redundancy of the shards.

        Returns the number of steps in the loaded state, and the dense state: an exported state,
        given to the dense holders; `None` for the undisturbed start, step 0.
        Raises PeerFailure as transport calls do, and an EcrmError on every rank if nothing is left
        to go on from.
        """


class Rollback:
    """The state of a checkpoint on the surviving ranks.

    Has `view`, `layouts`, `hosted`, `protection` with `context`, `step`, `dense` (exported state or
    `None`), and `commits`, more than counted on any rank.

    Collective; all ranks must know the survivors. `mine` is the (commits, view, shape) of this
    rank; the view and shape of the newest epoch count. No earlier state is used.
    """

    def __init__(
        self,
        durable: Durable,
        transport: Transport,
        mine: tuple[int, View, StripeShape],
        stores: ShardStores,
        context: ProtectionContext,
        protection: Protection,
        dense_replicas: int,
    ) -> None:
        newest, shape, self.commits = _newest(transport, *mine)
        dead = [rank for rank in newest.live if rank not in transport.live]
        self.view = plan_rollback(newest, dead, shape, dense_replicas)
        self.layouts = stores.layouts(shape)
        self.protection = protection.with_shape(shape)
        self.hosted = stores.host(
            self.view.shards_of(transport.rank), self.layouts, self.protection, missing=False
        )
        self.context = replace(context, layouts=self.layouts, hosted=self.hosted, committed=0)
        self.protection.start(self.context, self.view)
        self.step, self.dense = durable.restore(
            transport, self.layouts, self.hosted, self.protection, self.view
        )


def _newest(
    transport: Transport, commits: int, view: View, shape: StripeShape
) -> tuple[View, StripeShape, int]:
    """The newest view of all ranks, the stripes, and the highest number of commits, plus 1."""
    mine = [view.epoch, commits, [shape.shards, shape.k, shape.m], view.to_json()]
    said = list(transport.gather(mine, "rolling back").values())
    _, _, (shards, k, m), text = max(said, key=lambda words: words[0])
    return View.from_json(text), StripeShape(shards, k, m), max(words[1] for words in said) + 1

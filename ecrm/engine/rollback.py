"""All state loaded anew from the durable tier, when more was lost than the protection covers."""

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
    """What outlives every rank."""

    def restore(
        self,
        transport: Transport,
        layouts: Sequence[RowLayout],
        hosted: dict[ShardSpace, HostedShard],
        protection: Protection,
        view: View,
    ) -> tuple[int, list[Tensor] | None]:
        """Collective: fill shards that are all zeros, and their redundancy.

        Returns the steps that are in it, and the dense state. That is an exported one, given to the
        holders of the dense replica; None for the undisturbed start, step 0.
        Raises PeerFailure as transport calls do, and an EcrmError on every rank when there is
        nothing to go on from.
        """


class Rollback:
    """The state of a checkpoint on the ranks that are left.

    That is `view`, `layouts`, `hosted`, `protection` and its `context`, `step`, `dense` (exported
    state or None), and `commits`, more than any rank has counted.

    Collective; which ranks are left must be known to all. `mine` is this rank's (commits, view,
    shape), of which the newest counts. Nothing of the state before is used.
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
        self.layouts = tuple(RowLayout(shape, space.rows) for space in stores.spaces)
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
    """The newest view of all ranks with its stripes, and one commit more than any has seen."""
    mine = [view.epoch, commits, [shape.shards, shape.k, shape.m], view.to_json()]
    said = list(transport.gather(mine, "rolling back").values())
    _, _, (shards, k, m), text = max(said, key=lambda words: words[0])
    return View.from_json(text), StripeShape(shards, k, m), max(words[1] for words in said) + 1

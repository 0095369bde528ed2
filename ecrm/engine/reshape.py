"""Laying all rows and parity out over other stripes, beside the old layout until all agree."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ecrm.engine.record_delivery import address, by_shard, place
from ecrm.engine.shard_stores import ShardStores
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View
from ecrm.protection.base import Protection
from ecrm.protection.context import ProtectionContext
from ecrm.transport.message import Part
from ecrm.transport.piggyback import exchange_rounds

WINDOW_BYTES = 1 << 22
"""Bytes of records per shard sent at a time: bounds the memory of messages."""


class Reshape:
    """The new layout during the reshape.

    Has `shape`, `view`, `layouts`, `hosted`, `protection` with `context`. `began` is by the
    engine's clock; `moved_bytes` counts bytes of records over all ranks, after `run`.
    Takes no row from the old layout: a failure before the agreement only drops the new layout.
    """

    def __init__(
        self,
        shape: StripeShape,
        view: View,
        old: ProtectionContext,
        protection: Protection,
        stores: ShardStores,
        began: float,
    ) -> None:
        self.shape, self.view, self.began = shape, view, began
        self.layouts = stores.layouts(shape)
        self.protection = protection.with_shape(shape)
        self.hosted = stores.host(
            view.shards_of(old.transport.rank), self.layouts, self.protection, missing=False
        )
        self.context = replace(old, layouts=self.layouts, hosted=self.hosted)
        self.protection.start(self.context, view)
        self.moved_bytes = 0
        self._old = old

    def run(self) -> None:
        """Collective, at a commit, nothing missing: move every row ever updated and encode it."""
        transport = self._old.transport
        for space, layout in enumerate(self._old.layouts):
            rows = max(1, WINDOW_BYTES // self._old.record_bytes[space])
            for first in range(0, layout.data_rows_per_shard, rows):
                window = torch.arange(first, min(first + rows, layout.data_rows_per_shard))
                received = transport.exchange(self._outgoing(space, window))
                changes = place(received, self.hosted)
                exchange_rounds(transport, self.protection.protect(changes, self.view))
                self.protection.committed()
        self.moved_bytes = sum(transport.gather(self.moved_bytes).values())

    def _outgoing(self, space: int, window: Tensor) -> dict[int, list[Part]]:
        """Messages of (new shard, space), new local rows, records, of a window of every shard."""
        outgoing: dict[int, list[Part]] = {}
        for (shard, this), hosted in sorted(self._old.hosted.items()):
            if this != space:
                continue
            local = window[hosted.store.updated(window)]
            for target, here, places in by_shard(
                self.layouts[space], self._old.layouts[space].rows_of(shard, local)
            ):
                records = hosted.store.read(local[here])
                self.moved_bytes += records.nbytes
                address(outgoing, self.view, target, space, places, records)
        return outgoing

"""Step replay: a step done again with the requests from before a failure.

If all slots have computed the step and no slot is lost, only the new hosts of lost shards do not
know the requests, and learn the rows with the ledger. All ranks hear the ledger, so the hosts of
the units for decoding need no request either.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ecrm.engine.lookup import Lookup, LookupContext
from ecrm.placement.view import View
from ecrm.transport.message import Received


@dataclass(frozen=True)
class StepReplay:
    """The means of this rank to replay `step`: the `lookup` in `view`, with all slots computed."""

    step: int
    lookup: Lookup
    view: View

    def told(self, live: Collection[int]) -> list[Received]:
        """The requests of this rank's slots to shards without a `live` host.

        Heads and local rows; nothing if `again` is certain to return `None`.
        """
        lost = lost_shards(self.view, live)
        if not set(self.view.rebuilding) <= lost or not set(self.view.slots) <= set(live):
            return []
        return self.lookup.slot_side.of_shards(lost)

    def again(
        self,
        context: LookupContext,
        before: View,
        live: Collection[int],
        told: Mapping[int, Sequence[Received]],
    ) -> Lookup | None:
        """The lookup for the replayed step, in the view of `context`; `None` without a replay.

        The view comes from `before`, and all ranks were `told` the requests. No replay if `before`
        is not the view of the step, as after a recovery broken off, or if ranks besides the new
        hosts would need requests. All ranks decide the same.
        """
        view, lost = context.view, lost_shards(self.view, live)
        if before != self.view or view.slots != before.slots or set(view.rebuilding) != lost:
            return None
        moved = {
            shard
            for shard, (old, new) in enumerate(zip(before.shards, view.shards, strict=True))
            if old != new
        }
        return self.lookup.again(context, told) if moved <= lost else None


def lost_shards(view: View, live: Collection[int]) -> set[int]:
    """Shards of `view` without a host in `live`."""
    return {shard for shard, host in enumerate(view.shards) if host not in live}

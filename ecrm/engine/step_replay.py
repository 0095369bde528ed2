"""A step done again with what was asked for it before a failure.

Where slots have computed their step and none of them is lost, only the new hosts of lost shards do
not know what they are asked, and the rows are told them with the ledger. All ranks hear that, so
the hosts of the units that lost rows are decoded from need not be asked for them either.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ecrm.engine.lookup import Lookup, LookupContext
from ecrm.placement.view import View
from ecrm.transport.message import Received


@dataclass(frozen=True)
class StepReplay:
    """What this rank can do `step` again with: its `lookup` in `view`; its slots have computed."""

    step: int
    lookup: Lookup
    view: View

    def told(self, live: Collection[int]) -> list[Received]:
        """What this rank's slots ask of shards whose hosts are not `live`.

        Heads and local rows; nothing where `again` will be None.
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
        """The lookup for the step done again, in the view of `context`; None where that cannot be.

        The view comes from `before`, and all ranks were `told` what they are asked. It cannot be
        where `before` is not the view of the step, as after a recovery that was broken off, and
        where others than new hosts would have to be told more. All ranks find the same.
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
    """Shards of `view` whose hosts are not among `live`."""
    return {shard for shard, host in enumerate(view.shards) if host not in live}

"""Stateless parameter servers: training does not wait for a lost shard, and loses some updates.

After the stateless parameter server of "Training Through Failure: Effects of Data Consistency in
Parallel Machine Learning Training" (Cao, Luo, Gan and Jinesh, 2024), which trades consistency for
going on. While a shard is gone, slots go on with the rows last seen and keep the shard's gradients
(`ecrm/protection/stand_in.py`). The new host alone fills the shard from the newest checkpoint, some
rows at each step (`ecrm/protection/restoring.py`). Then the host is sent the kept gradients and
applies them, step by step. From the same step on the shard answers for itself. Updates between the
checkpoint and the failure are lost, and the kept gradients were computed from old rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View
from ecrm.protection.base import RepairReport
from ecrm.protection.context import ProtectionContext
from ecrm.protection.kinds import KINDS
from ecrm.protection.none import NoProtection
from ecrm.protection.restoring import DurableRows, Restoring
from ecrm.protection.routing import GRADIENTS, ShardRequests
from ecrm.protection.stand_in import StandIn
from ecrm.storage.hosted import ShardSpace
from ecrm.transport.message import Part, Picked, Received, in_groups, tensors

DENSE_REPLICAS = 2


class StatelessProtection(NoProtection):
    """Any shards may be lost while a dense replica is left: `source` restores lost shards.

    Not exact: `accounts` reports the losses. A rank with slots remembers up to `last_seen_rows`
    rows of each row space. A `source` of `None` suffices for questions about the layout.
    """

    kind = KINDS["stateless"]
    any_shards_may_be_lost = True
    stand_in: StandIn

    def __init__(self, shards: int, source: DurableRows | None, last_seen_rows: int) -> None:
        super().__init__(shards)
        self._source, self._last_seen_rows = source, last_seen_rows
        self._restoring: dict[int, Restoring] = {}
        # by lost shard: the commit that survivors went back to
        self._lost_at: dict[int, int] = {}
        # accounts of shards that got the kept gradients since the commit
        self._delivered: dict[int, dict[str, Any]] = {}
        self._counted: dict[int, dict[str, Any]] = {}  # delivered before the last commit

    @property
    def dense_replicas(self) -> int:
        return DENSE_REPLICAS

    @property
    def in_words(self) -> str:
        return "stateless parameter servers"

    @property
    def redundancy_bytes(self) -> int:
        return self.stand_in.memory_bytes

    @property
    def log_bytes(self) -> int:
        return self.stand_in.kept_bytes

    def with_shape(self, shape: StripeShape) -> StatelessProtection:
        return StatelessProtection(shape.shards, self._source, self._last_seen_rows)

    def start(self, context: ProtectionContext, view: View) -> None:
        self._context = context
        assert context.initial is not None
        self.stand_in = StandIn(context.layouts, context.initial, self._last_seen_rows)

    def adopt(self, view: View) -> None:
        mine = set(view.shards_of(self._context.transport.rank)) & set(view.rebuilding)
        self._restoring = {
            shard: restoring for shard, restoring in self._restoring.items() if shard in mine
        }
        for shard in mine.difference(self._restoring):
            hosted = {
                space: rows
                for (number, space), rows in self._context.hosted.items()
                if number == shard
            }
            assert self._source is not None
            self._restoring[shard] = Restoring(
                self._source.read(shard, self._context.layouts), hosted
            )
        for shard in view.rebuilding:
            self._lost_at.setdefault(shard, self._context.committed)
        self.stand_in.away = frozenset(view.rebuilding)

    def repair(self, wanted: dict[ShardSpace, Tensor], budget: int, view: View) -> RepairReport:
        """Restore some rows; send the kept gradients to shards with all rows restored.

        `wanted` is always empty.
        """
        for _, restoring in sorted(self._restoring.items()):
            restoring.go_on(budget)
        left, found, told = self._share_state(view)
        due = [
            shard for shard in view.rebuilding if left[shard] == 0 and shard not in self._delivered
        ]
        if due:
            self._deliver(due, view)
        for shard in due:
            self._delivered[shard] = self._account(
                shard, *found[shard], told[shard], len(view.slots)
            )
        self.stand_in.away = frozenset(view.rebuilding).difference(self._delivered)
        return RepairReport(left, {})

    def _share_state(
        self, view: View
    ) -> tuple[dict[int, int], dict[int, tuple[int, list[str]]], dict[int, list[int]]]:
        """Collective: the state of every rebuilding shard, three maps by shard.

        Rows left to restore; step of the checkpoint and reasons against newer checkpoints; totals
        over all ranks of slot steps kept, rows kept, last seen and initial rows given out.
        """
        hosts: list[list[Any]] = []
        slots: list[list[int]] = []
        for shard, restoring in sorted(self._restoring.items()):
            hosts.append(
                [shard, restoring.left, restoring.reader.step or 0, restoring.reader.refused]
            )
        for shard in view.rebuilding:
            kept, served = self.stand_in.kept(shard), self.stand_in.served(shard)
            rows = sum(local.numel() for entry in kept for _, local, _ in entry.parts)
            slots.append([len(kept), rows, served.seen, served.initial])
        said = torch.tensor(list(json.dumps(hosts).encode()), dtype=torch.uint8)
        shared = self._context.transport.share([said, torch.tensor(slots)])
        left: dict[int, int] = {}
        found: dict[int, tuple[int, list[str]]] = {}
        all_counts = []
        for text, counts in map(tensors, shared.values()):
            all_counts.append(counts.view(len(view.rebuilding), 4))
            for shard, missing, step, refused in json.loads(bytes(text.tolist())):
                left[shard], found[shard] = missing, (step, refused)
        totals = torch.stack(all_counts).sum(dim=0).tolist()
        return left, found, dict(zip(view.rebuilding, totals, strict=True))

    def _account(
        self, shard: int, checkpoint: int, refused: list[str], told: list[int], slots: int
    ) -> dict[str, Any]:
        """The losses of a shard that has got the kept gradients."""
        kept, kept_rows, seen, initial = told
        lost_at, now = self._lost_at[shard], self._context.committed
        return {
            "shard": shard,
            "lost_at_step": lost_at,
            "checkpoint_step": checkpoint,
            "refused": refused,
            "lost_steps": lost_at - checkpoint,
            "steps_away": now - lost_at,
            "kept_rows": kept_rows,
            "lost_slot_steps": (now - lost_at) * slots - kept,
            "last_seen_rows": seen,
            "initial_rows": initial,
        }

    def _deliver(self, due: Sequence[int], view: View) -> None:
        """Collective: send the gradients kept for the `due` shards to the hosts.

        The hosts apply the gradients in the order of steps, one update per step.
        """
        outgoing: dict[int, list[Part]] = {}
        for shard in due:
            for entry in self.stand_in.kept(shard):
                for space, local, sums in entry.parts:
                    head = (entry.step, GRADIENTS, entry.slot, shard, space)
                    outgoing.setdefault(view.shards[shard], []).extend((head, local, sums))
        asked: dict[int, dict[int, list[Received]]] = {}
        gradients: dict[int, dict[tuple[int, int, int], Tensor | Picked]] = {}
        for rank, parts in self._context.transport.exchange(outgoing).items():
            for (step, *key), local, flat in in_groups(parts, 3):
                asked.setdefault(step, {}).setdefault(rank, []).extend((tuple(key), local))
                slot, of_shard, of_space = key[1:]
                gradients.setdefault(step, {})[slot, of_shard, of_space] = flat
        for step in sorted(asked):
            ShardRequests.of(asked[step], self._context.hosted).update(
                gradients[step], keep_deltas=True, step=step
            )

    def committed(self) -> None:
        self._counted, self._delivered = self._delivered, {}
        for shard in self._counted:
            del self._lost_at[shard]
            self._restoring.pop(shard, None)
        self.stand_in.forget(self._counted)
        self.stand_in.committed()

    def accounts(self, shards: Sequence[int]) -> list[dict[str, Any]]:
        return [self._counted[shard] for shard in shards]

    def undo(self) -> None:
        for restoring in self._restoring.values():
            restoring.restart()
        self._delivered = {}
        self.stand_in.undo(self._context.committed)

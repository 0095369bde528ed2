"""One round of repair: rows wanted now and a budget of others, decoded from any k units of their stripes.

Further rows are probed: where the k units are zeros, because no row of the stripe was ever updated, the missing one is
zeros as well, and nothing need be sent. So rows that were updated come back without waiting for the others.

A missing row's sources depend only on its stripe's residue and its unit number, so rows are handled
in at most k + m groups per shard, each with one decoding matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ecrm.coding.code import ReedSolomon
from ecrm.kernels.decode import decode
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View
from ecrm.protection.base import ProtectionContext, RepairReport, ShardSpace
from ecrm.protection.parity import ParityRows
from ecrm.transport.message import in_groups


PROBES_PER_ROW = 4
"""Rows probed per row of the budget: a probe costs each source a flag, a row its record."""


@dataclass(frozen=True)
class Group:
    """Missing local rows of one unit of one hosted shard, and the units they are decoded from, or with `probe` only probed."""

    shard: int
    space: int
    unit: int
    local: Tensor
    sources: tuple[int, ...]
    probe: bool


class Rebuild:
    """Repair over one view; lives for one round."""

    def __init__(
        self,
        shape: StripeShape,
        code: ReedSolomon,
        context: ProtectionContext,
        parity: dict[ShardSpace, ParityRows],
        view: View,
    ) -> None:
        self._shape, self._code, self._context, self._parity, self._view = shape, code, context, parity, view

    def round(self, wanted: dict[ShardSpace, Tensor], budget: int) -> RepairReport:
        """Collective: recover `wanted` and up to `budget` further rows per hosted shard; see `Protection.repair`."""
        status = self._status()
        outgoing = {rank: [status] for rank in self._view.live} if status.numel() else {}
        groups = self._choose(wanted, budget)
        for number, group in enumerate(groups):
            stripes = self._stripes(group)
            for source in group.sources:
                holder = self._shape.shard_of_unit(self._residue(group), source)
                head = torch.tensor([number, holder, group.space, source, group.probe])
                local = self._context.layouts[group.space].local_of_unit(stripes, source)
                outgoing.setdefault(self._view.shards[holder], []).extend((head, local))
        requests = self._context.transport.exchange(outgoing)
        report = self._read_statuses(requests)
        replies: dict[int, list[Tensor]] = {}
        for rank, tensors in requests.items():
            for head, local in in_groups(tensors, 2):
                number, holder, space, source, probe = head.tolist()
                records = (self._probe if probe else self._read)(holder, space, source, local)
                replies.setdefault(rank, []).extend((torch.tensor([number, source]), records))
        self._decode(groups, self._context.transport.exchange(replies))
        return report

    def _status(self) -> Tensor:
        """Shard, missing rows, rows decoded on demand, of each rebuilding shard hosted here, flat int64."""
        status: list[int] = []
        for shard in self._view.shards_of(self._context.transport.rank):
            if shard in self._view.rebuilding:
                keys = [key for key in self._parity if key[0] == shard]
                hosted = [self._context.hosted[key] for key in keys]
                left = sum(h.missing_rows + self._parity[key].missing_rows for h, key in zip(hosted, keys, strict=True))
                status += (shard, left, sum(h.on_demand_rows for h in hosted))
        return torch.tensor(status, dtype=torch.int64)

    def _read_statuses(self, requests: dict[int, list[Tensor]]) -> RepairReport:
        """Take the leading status message of every rank that hosts a rebuilding shard off its requests."""
        left, on_demand = {}, {}
        for rank in {self._view.shards[shard] for shard in self._view.rebuilding}:
            for shard, missing, decoded in zip(*[iter(requests[rank].pop(0).tolist())] * 3, strict=True):
                left[shard], on_demand[shard] = missing, decoded
        return RepairReport(left, on_demand)

    def _choose(self, wanted: dict[ShardSpace, Tensor], budget: int) -> list[Group]:
        """Groups to recover this round: all wanted rows, then missing data rows, then parity rows, in row order; and to probe."""
        groups: list[Group] = []
        left = dict.fromkeys(self._view.rebuilding, budget)
        k, m = self._shape.k, self._shape.m
        for key in sorted(self._parity):
            shard, space = key
            hosted, parity = self._context.hosted[key], self._parity[key]
            if hosted.missing is not None:
                asked = wanted.get(key, torch.empty(0, dtype=torch.int64))
                hosted.on_demand_rows += asked.numel()
                background = hosted.missing.first(left[shard] + asked.numel())
                background = background[~torch.isin(background, asked)][: left[shard]]
                left[shard] -= background.numel()
                chosen = torch.cat([asked, background])
                self._add_groups(groups, key, range(k), chosen, hosted.missing.unprobed(PROBES_PER_ROW * budget))
            if parity.missing is not None:
                background = parity.missing.first(left[shard])
                left[shard] -= background.numel()
                self._add_groups(groups, key, range(k, k + m), background, parity.missing.unprobed(PROBES_PER_ROW * budget))
        return groups

    def _add_groups(self, groups: list[Group], key: ShardSpace, units: range, chosen: Tensor, probed: Tensor) -> None:
        """One group per unit to recover, and one to probe, of local rows that take the units in turn."""
        probed = probed[~torch.isin(probed, chosen)]
        for place, unit in enumerate(units):
            self._add_group(groups, *key, unit, chosen[chosen % len(units) == place], probe=False)
            self._add_group(groups, *key, unit, probed[probed % len(units) == place], probe=True)

    def _add_group(self, groups: list[Group], shard: int, space: int, unit: int, local: Tensor, probe: bool) -> None:
        if local.numel():
            sources = self._sources(self._shape.residue_of_unit(shard, unit))
            groups.append(Group(shard, space, unit, local, sources, probe))

    def _whole(self, residue: int) -> list[int]:
        """Units of stripes of that residue on shards with nothing missing."""
        return [u for u in range(self._shape.width) if self._shape.shard_of_unit(residue, u) not in self._view.rebuilding]

    def _sources(self, residue: int) -> tuple[int, ...]:
        """Units that a missing one is decoded from."""
        return tuple(self._whole(residue)[: self._shape.k])

    def _residue(self, group: Group) -> int:
        return self._shape.residue_of_unit(group.shard, group.unit)

    def _stripes(self, group: Group) -> Tensor:
        layout = self._context.layouts[group.space]
        if group.unit < self._shape.k:
            return layout.stripes_of_data(group.shard, group.local)
        return layout.stripes_of_parity(group.shard, group.local)

    def _read(self, shard: int, space: int, unit: int, local: Tensor) -> Tensor:
        """What a source sends: records of one unit hosted here, uint8 [R, record bytes]."""
        return self._held(shard, space, unit, local)

    def _held(self, shard: int, space: int, unit: int, local: Tensor) -> Tensor:
        """Records of one unit hosted here, uint8 [R, record bytes]."""
        if unit < self._shape.k:
            return self._context.hosted[shard, space].store.read(local)
        return self._parity[shard, space].records.index_select(0, local)

    def _probe(self, shard: int, space: int, unit: int, local: Tensor) -> Tensor:
        """Whether the records of one unit hosted here are other than zeros, bool [R]."""
        if unit < self._shape.k:
            return self._context.hosted[shard, space].store.updated(local)
        return (self._held(shard, space, unit, local) != 0).any(dim=1)

    def _decode(self, groups: list[Group], replies: dict[int, list[Tensor]]) -> None:
        """Decode every group from its sources' records and fill its rows in."""
        units: dict[tuple[int, int], Tensor] = {}
        for tensors in replies.values():
            for head, records in in_groups(tensors, 2):
                units[tuple(head.tolist())] = records
        for number, group in enumerate(groups):
            key = (group.shard, group.space)
            target = self._context.hosted[key] if group.unit < self._shape.k else self._parity[key]
            if group.probe:
                target.restore_zeros(group.local[~torch.stack([units[number, source] for source in group.sources]).any(dim=0)])
                continue
            sent = torch.stack([units[number, source].view(group.local.numel(), -1) for source in group.sources])
            target.restore(*self._recovered(group, sent))

    def _recovered(self, group: Group, sent: Tensor) -> tuple[Tensor, Tensor]:
        """(local rows, their records) from what the group's sources sent, uint8 [sources, R, bytes]."""
        matrix = torch.tensor(self._code.decode_matrix(group.sources, (group.unit,)))
        return group.local, decode(sent, matrix)[0]

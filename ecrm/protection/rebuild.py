"""One round of repair: missing rows decoded from any k units of a stripe.

Rows awaited by slots come first, then rows wanted later, then background rows, up to a budget in
all.

Further rows are probed. The last byte of a record is zero just if the row was never updated. Parity
is linear byte by byte, so the last bytes of k units show the missing records of zeros. So updated
rows come back without waiting for never updated rows.

The sources of a missing row depend only on the stripe's residue and the unit number. So rows are
handled in at most 2 (k + m) groups per shard and row space, with one decoding matrix per group.

The new host decodes rows asked for by a step. Survivors decode background rows: the k units of a
group meet on a host of a unit, and the host hands the decoded rows on. So a lost shard reaches its
new host once, and not k times, and the survivors share the decoding. A round has three legs:
requests, units, and decoded rows. Decoded rows travel with the redundancy of the step, and are
filled in before the step's deltas: parity is then of the same step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ecrm.device.copies import on_device
from ecrm.kernels.decode import decode
from ecrm.placement.stripes import StripeShape
from ecrm.placement.view import View
from ecrm.protection.base import RepairReport, RepairRound
from ecrm.protection.coding.code import ReedSolomon
from ecrm.protection.context import ProtectionContext
from ecrm.protection.parity import ParityRows
from ecrm.protection.routing import REPAIR
from ecrm.storage.hosted import HostedShard, ShardSpace
from ecrm.storage.missing_rows import MissingRows
from ecrm.transport.message import Part, Received, gathered, in_groups

PROBES_PER_ROW = 64
"""Rows probed per row of the budget: a probe costs a source a byte, a row a whole record."""
HANDED = -1
"""First number of the head of decoded rows: no shard has the number."""


@dataclass(frozen=True)
class Unit:
    """One unit of one shard, and the source units for decoding the unit's rows.

    `decoder`: the rank that gets the source units.
    """

    shard: int
    space: int
    unit: int
    sources: tuple[int, ...]
    decoder: int


@dataclass(frozen=True)
class Group(Unit):
    """Missing local rows of a unit, to be decoded.

    `wanted`: whether slots wait for the rows. The first `asked` rows are asked for by a step, with
    or without waiting.
    """

    local: Tensor
    wanted: bool
    asked: int


@dataclass(frozen=True)
class Probe(Unit):
    """The rows of a unit in periods `first` to `last` - 1.

    Sources are asked only for last bytes of records.
    """

    first: int
    last: int


class Rebuild(RepairRound):
    """A round of repair over one view, for `Protection.begin_repair`.

    The round takes all `wanted` rows and all rows wanted `soon`. Background rows fill up the
    `budget` of rows per hosted shard. Without `before`, new hosts decode all rows, and `finish`
    fills in all rows. With `before`, decoded rows of `before` may still be on their way, and
    `finished` is called with the round after `finish`: `handed_on` and `take` follow.
    """

    def __init__(
        self,
        shape: StripeShape,
        code: ReedSolomon,
        context: ProtectionContext,
        parity: dict[ShardSpace, ParityRows],
        view: View,
        wanted: dict[ShardSpace, Tensor],
        soon: dict[ShardSpace, Tensor],
        budget: int,
        before: Sequence[Rebuild] | None = None,
        finished: Callable[[Rebuild], None] = lambda done: None,
    ) -> None:
        self._shape, self._code, self._context, self._parity, self._view = (
            shape,
            code,
            context,
            parity,
            view,
        )
        self._me, self._finished = context.transport.rank, finished
        self._hands_on = before is not None and shape.k > 1
        self._decoders: Counter[int] = Counter()  # rows by decoder
        self._statuses = self._status(wanted)
        on_their_way = [group for each in before or () for group in each.away]
        self._asks = self._choose(wanted, soon, budget, on_their_way)
        self._asked: list[tuple[int, tuple[int, ...], Tensor]] = []
        # by (new host, number): units to decode for other ranks, and the decoded records
        self._orders: dict[tuple[int, int], Unit] = {}
        self._decoded: dict[tuple[int, int], Tensor] = {}

    @property
    def away(self) -> list[Group]:
        """The groups of this rank's shards decoded by other ranks."""
        return [ask for ask in self._asks if isinstance(ask, Group) and ask.decoder != self._me]

    def requests(self) -> dict[int, list[Part]]:
        """Messages to all ranks and to the holders of sources.

        To all: the status of the rank's rebuilding shards, headed (REPAIR). To holders: local rows,
        or no rows but periods to probe, headed (REPAIR, number of the group or probe, shard, space,
        unit, whether wanted, first period, last + 1, decoder). To decoders: source units, headed
        (REPAIR, number of the group, shard, space, unit).
        """
        status = self._statuses
        outgoing: dict[int, list[Part]] = {}
        if status.numel():
            outgoing = {rank: [(REPAIR,), status] for rank in self._view.live}
        for number, ask in enumerate(self._asks):
            for rank, head, local in self._of_sources(number, ask, self._view.live):
                outgoing.setdefault(rank, []).extend(((REPAIR, *head), local))
            if ask.decoder != self._me:
                order = (REPAIR, number, ask.shard, ask.space, ask.unit)
                outgoing.setdefault(ask.decoder, []).extend((order, torch.tensor(ask.sources)))
        return outgoing

    def _of_sources(
        self, number: int, ask: Group | Probe, ranks: Collection[int]
    ) -> Iterator[tuple[int, tuple[int, ...], Tensor]]:
        """(rank, head without REPAIR, local rows) for each source of `ask` on `ranks`."""
        residue = self._shape.residue_of_unit(ask.shard, ask.unit)
        holders = ((source, self._shape.shard_of_unit(residue, source)) for source in ask.sources)
        here = [
            (source, holder) for source, holder in holders if self._view.shards[holder] in ranks
        ]
        if not here:
            return
        if isinstance(ask, Group):
            stripes, how = self._stripes(ask), (int(ask.wanted), 0, 0)
        else:
            stripes, how = torch.empty(0, dtype=torch.int64), (0, ask.first, ask.last)
        for source, holder in here:
            local = self._context.layouts[ask.space].local_of_unit(stripes, source)
            head = (number, holder, ask.space, source, *how, ask.decoder)
            yield self._view.shards[holder], head, local

    def foresee(self, rows: Mapping[ShardSpace, Tensor]) -> None:
        """Instead of `receive_requests`: foresee the requests of hosts of rebuilding shards.

        No row of the shards is back yet, and `rows` of the shards are wanted soon.
        """
        whole = sum(
            layout.data_rows_per_shard + layout.parity_rows_per_shard
            for layout in self._context.layouts
        )
        rebuilding = self._view.rebuilding
        self.report, self.urgent = (
            RepairReport(dict.fromkeys(rebuilding, whole), dict.fromkeys(rebuilding, 0)),
            False,
        )
        none, k = torch.empty(0, dtype=torch.int64), self._shape.k
        for host in {self._view.shards[shard] for shard in rebuilding}:
            groups = (
                group
                for key in sorted(rows)
                if self._view.shards[key[0]] == host
                for group in self._groups_of(key, range(k), rows[key], none, wanted=False)
            )
            for number, group in enumerate(groups):
                self._asked += [
                    (host, head, local)
                    for _, head, local in self._of_sources(
                        number, group, (self._context.transport.rank,)
                    )
                ]

    def receive_requests(self, requests: Mapping[int, Sequence[Received]]) -> None:
        left, on_demand, self.urgent = {}, {}, False
        for rank, tensors in requests.items():
            for head, payload in in_groups(tensors, 2):
                if len(head) == 5:
                    _, number, shard, space, unit = head
                    sources = tuple(payload.tolist())
                    self._orders[rank, number] = Unit(shard, space, unit, sources, self._me)
                    continue
                if len(head) > 1:
                    self._asked.append((rank, head[1:], payload))
                    continue
                for shard, missing, decoded, wanted in zip(
                    *[iter(payload.tolist())] * 4, strict=True
                ):
                    left[shard], on_demand[shard] = missing, decoded
                    self.urgent |= wanted > 0
        self.report = RepairReport(left, on_demand)

    def answers(self) -> dict[int, list[Part]]:
        """Wanted records, headed (new host, number of the group, unit)."""
        return self._answers(wanted=True)

    def rest(self) -> dict[int, list[Part]]:
        """Further records and probed last bytes.

        Headed (new host, number of the group or probe, unit).
        """
        return self._answers(wanted=False)

    def _answers(self, wanted: bool) -> dict[int, list[Part]]:
        replies: dict[int, list[Part]] = {}
        for rank, head, local in self._asked:
            number, holder, space, source, of_wanted, first, last, decoder = head
            if of_wanted != wanted:
                continue
            if last:
                found = self._probe(holder, space, source, self._of_periods(source, first, last))
            else:
                found = self._read(holder, space, source, local)
            replies.setdefault(decoder, []).extend(((rank, number, source), found))
        return replies

    def _status(self, wanted: dict[ShardSpace, Tensor]) -> Tensor:
        """The status of the rank's rebuilding shards, flat int64.

        Four numbers per shard: shard, missing rows, rows decoded on demand, wanted rows.
        """
        status: list[int] = []
        for shard in self._view.shards_of(self._context.transport.rank):
            if shard in self._view.rebuilding:
                keys = [key for key in self._parity if key[0] == shard]
                hosted = [self._context.hosted[key] for key in keys]
                left = sum(
                    h.missing_rows + self._parity[key].missing_rows
                    for h, key in zip(hosted, keys, strict=True)
                )
                waiting = sum(wanted[key].numel() for key in keys if key in wanted)
                status += (shard, left, sum(h.on_demand_rows for h in hosted), waiting)
        return torch.tensor(status, dtype=torch.int64)

    def _choose(
        self,
        wanted: dict[ShardSpace, Tensor],
        soon: dict[ShardSpace, Tensor],
        budget: int,
        on_their_way: Sequence[Group],
    ) -> list[Group | Probe]:
        """Groups to recover and units to probe in the round.

        All rows wanted now or soon. If the rows are fewer than the budget, also missing data
        rows, then parity rows, in row order, but for groups `on_their_way`.
        """
        groups: list[Group | Probe] = []
        left, none = dict.fromkeys(self._view.rebuilding, budget), torch.empty(0, dtype=torch.int64)
        asked = {
            key: torch.cat(
                [wanted.get(key, none), _without(soon.get(key, none), wanted.get(key, none))]
            )
            for key in {*wanted, *soon}
        }
        for (shard, _), rows in asked.items():
            left[shard] = max(left[shard] - rows.numel(), 0)
        k, m = self._shape.k, self._shape.m
        for key in sorted(self._parity):
            shard, _space = key
            hosted, parity = self._context.hosted[key], self._parity[key]
            if hosted.missing is not None and hosted.missing_rows:
                now = wanted.get(key, none)
                both = asked.get(key, none)
                passed = torch.cat([both, *_rows_of(on_their_way, key, range(k))])
                background = hosted.missing.first(left[shard], passed)
                left[shard] -= background.numel()
                groups += self._groups_of(key, range(k), now, none, wanted=True)
                groups += self._beside(key, range(k), both[now.numel() :], background)
                groups += self._probes_of(key, range(k), hosted.missing, budget)
            if parity.missing is not None and parity.missing_rows:
                passed = torch.cat([none, *_rows_of(on_their_way, key, range(k, k + m))])
                background = parity.missing.first(left[shard], passed)
                left[shard] -= background.numel()
                groups += self._beside(key, range(k, k + m), none, background)
                groups += self._probes_of(key, range(k, k + m), parity.missing, budget)
        return groups

    def _beside(
        self, key: ShardSpace, units: range, soon: Tensor, background: Tensor
    ) -> Iterator[Group]:
        """Groups that no slot waits for; survivors decode the `background` if the round allows."""
        if not self._hands_on:
            yield from self._groups_of(key, units, soon, background, wanted=False)
            return
        yield from self._groups_of(key, units, soon, background[:0], wanted=False)
        for group in self._groups_of(key, units, soon[:0], background, wanted=False):
            yield replace(group, decoder=self._least_busy(group))

    def _least_busy(self, group: Group) -> int:
        """The host of a source with the fewest rows to decode; hosts take turns from step to step.

        Counts the rows of the group.
        """
        residue = self._shape.residue_of_unit(group.shard, group.unit)
        shards, turn = self._view.shards, self._context.committed
        hosts = {shards[self._shape.shard_of_unit(residue, source)] for source in group.sources}
        chosen = min(
            hosts, key=lambda rank: (self._decoders[rank], (rank + turn) % len(shards), rank)
        )
        self._decoders[chosen] += group.local.numel()
        return chosen

    def _groups_of(
        self, key: ShardSpace, units: range, asked: Tensor, background: Tensor, wanted: bool
    ) -> Iterator[Group]:
        """Local rows grouped by unit: local row r is of unit `units[r % len(units)]`."""
        chosen = torch.cat([asked, background])
        places = chosen % len(units)
        for place, unit in enumerate(units):
            here = (places == place).nonzero().squeeze(1)
            if here.numel():
                yield Group(
                    *key,
                    unit,
                    self._sources(key[0], unit),
                    self._view.shards[key[0]],
                    chosen[here],
                    wanted,
                    int((here < asked.numel()).sum()),
                )

    def _probes_of(
        self, key: ShardSpace, units: range, missing: MissingRows, budget: int
    ) -> Iterator[Probe]:
        """The next rows to probe, by unit."""
        first, last = missing.unprobed(-(-PROBES_PER_ROW * budget // len(units)) * len(units))
        for unit in units if last > first else ():
            yield Probe(
                *key,
                unit,
                self._sources(key[0], unit),
                self._me,
                first // len(units),
                last // len(units),
            )

    def _whole(self, residue: int) -> list[int]:
        """Units of the residue's stripes on shards without missing rows."""
        return [
            u
            for u in range(self._shape.width)
            if self._shape.shard_of_unit(residue, u) not in self._view.rebuilding
        ]

    def _sources(self, shard: int, unit: int) -> tuple[int, ...]:
        """Source units for decoding the missing `unit` of a shard."""
        return tuple(self._whole(self._shape.residue_of_unit(shard, unit))[: self._shape.k])

    def _of_periods(self, unit: int, first: int, last: int) -> slice:
        """Local rows, of data or parity, of a unit in periods `first` to `last` - 1."""
        k, m = self._shape.k, self._shape.m
        width, place = (k, unit) if unit < k else (m, unit - k)
        return slice(first * width + place, last * width, width)

    def _stripes(self, group: Group) -> Tensor:
        layout = self._context.layouts[group.space]
        if group.unit < self._shape.k:
            return layout.stripes_of_data(group.shard, group.local)
        return layout.stripes_of_parity(group.shard, group.local)

    def _read(self, shard: int, space: int, unit: int, local: Tensor) -> Tensor:
        """The answer of a source: records of one hosted unit, uint8 [R, record bytes]."""
        return self._held(shard, space, unit, local)

    def _held(self, shard: int, space: int, unit: int, local: Tensor) -> Tensor:
        """Records of one hosted unit, uint8 [R, record bytes]."""
        if unit < self._shape.k:
            return self._context.hosted[shard, space].store.read(local)
        return self._parity[shard, space].read(local)

    def _probe(self, shard: int, space: int, unit: int, local: slice) -> Tensor:
        """Last bytes of the records of one hosted unit, uint8 [R]."""
        return (
            self._context.hosted[shard, space].store
            if unit < self._shape.k
            else self._parity[shard, space]
        ).last_bytes(local)

    def finish(self, answers: Mapping[int, Sequence[Received]]) -> None:
        """Fill in the rows of every answered group, then the zero rows of every answered probe.

        Groups of other ranks are decoded, to be handed on.
        """
        units: dict[tuple[int, int, int], Tensor] = {}
        for tensors in answers.values():
            for head, records in in_groups(tensors, 2):
                units[head] = records
        answered = {
            number: [units[self._me, number, source] for source in ask.sources]
            for number, ask in enumerate(self._asks)
            if ask.decoder == self._me and (self._me, number, ask.sources[0]) in units
        }
        for number, sent in answered.items():
            if isinstance(group := self._asks[number], Group):
                parts = [part.view(group.local.numel(), -1) for part in sent]
                self._fill(group, *self._recovered(group, parts))
        # probes last: a group's row may lie within a probe, and must be removed only once
        for number, sent in answered.items():
            if isinstance(probe := self._asks[number], Probe):
                self._fill_zeros(probe, sent)
        for (rank, number), order in self._orders.items():
            if (rank, number, order.sources[0]) in units:
                width = self._context.record_bytes[order.space]
                parts = [units[rank, number, source] for source in order.sources]
                records = [part.view(part.numel() // width, width) for part in parts]
                self._decoded[rank, number] = self._decode(order, records)
        self._finished(self)

    def handed_on(self) -> dict[int, list[Part]]:
        """Rows decoded for other ranks, by new host.

        Three parts a group: a head (HANDED, number of the group, committed step), nothing, and
        records.
        """
        outgoing: dict[int, list[Part]] = {}
        none = torch.empty(0, dtype=torch.int64)
        for (rank, number), records in self._decoded.items():
            head = (HANDED, number, self._context.committed)
            outgoing.setdefault(rank, []).extend((head, none, records))
        return outgoing

    def take(self, received: Mapping[int, Sequence[Received]]) -> None:
        """Fill in the rows `handed_on` by all ranks; further parts of a message are passed over."""
        for tensors in received.values():
            for head, _, records in in_groups(tensors, 3):
                if head[0] == HANDED:
                    _, number, committed = head
                    assert committed == self._context.committed, "rows of another round"
                    group = self._asks[number]
                    assert isinstance(group, Group)
                    came = gathered(records).view(group.local.numel(), -1)
                    self._fill(group, group.local, came)

    def _target(self, unit: Unit) -> HostedShard | ParityRows:
        key = (unit.shard, unit.space)
        return self._context.hosted[key] if unit.unit < self._shape.k else self._parity[key]

    def _fill(self, group: Group, local: Tensor, records: Tensor) -> None:
        """Fill in local rows still missing: a row on its way may have been asked for meanwhile."""
        target = self._target(group)
        missing = (
            torch.zeros(local.numel(), dtype=torch.bool)
            if target.missing is None
            else target.missing.among(local)
        )
        if not missing.all():
            here = missing.nonzero().squeeze(1)
            local, records = local[here], records[on_device(records.device, here)]
        target.restore(local, records)
        if isinstance(target, HostedShard) and group.asked:
            target.on_demand_rows += group.asked

    def _fill_zeros(self, probe: Probe, sent: list[Tensor]) -> None:
        missing = self._target(probe).missing
        assert missing is not None, "only missing rows are probed"
        rows = self._of_periods(probe.unit, probe.first, probe.last)
        missing.remove_zeros(rows, self._zeros(probe, sent))
        missing.probed(rows.stop)

    def _zeros(self, probe: Probe, sent: list[Tensor]) -> Tensor:
        """Whether records of a unit are zeros, bool [R], from last bytes of sources, uint8 [R].

        Data records are zeros if never updated, parity records if the whole stripe was never
        updated.
        """
        units = (probe.unit,) if probe.unit < self._shape.k else range(self._shape.k)
        matrix = torch.tensor(self._code.decode_matrix(probe.sources, units))
        return (decode([part.view(1, -1) for part in sent], matrix) == 0).all(dim=0).squeeze(0)

    def _recovered(self, group: Group, sent: list[Tensor]) -> tuple[Tensor, Tensor]:
        """(local rows, recovered records) from the bytes of each source, uint8 [R, bytes]."""
        return group.local, self._decode(group, sent)

    def _decode(self, unit: Unit, sent: Sequence[Tensor]) -> Tensor:
        """Records of a unit from the records of each source, uint8 [R, record bytes]."""
        matrix = torch.tensor(self._code.decode_matrix(unit.sources, (unit.unit,)))
        # every rank that decodes has a shard: the new host its own, another rank a source
        device = next(iter(self._context.hosted.values())).store.device
        return decode([on_device(device, part) for part in sent], matrix)[0]


def _rows_of(groups: Iterable[Group], key: ShardSpace, units: range) -> list[Tensor]:
    """The local rows of the groups of `units` of a shard and space."""
    return [
        group.local for group in groups if (group.shard, group.space) == key and group.unit in units
    ]


def _without(rows: Tensor, others: Tensor) -> Tensor:
    """The `rows`, int64 [R], not among `others`."""
    return rows[~torch.isin(rows, others)]

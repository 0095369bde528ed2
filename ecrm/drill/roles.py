"""Who did which work, and when: the stays of ranks in roles, from the events of a run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ecrm.config.schema import ProtectionConfig
from ecrm.placement.assignment import CannotKeepApart, initial_view
from ecrm.placement.stripes import StripeShape
from ecrm.protection.kinds import KINDS
from ecrm.run.reading import Event

SERVER, TRAINER, BOTH, SPARE = "server", "trainer", "both", "spare"


@dataclass(frozen=True)
class Stay:
    """A rank in a role from `begin` to `end`, in seconds since the epoch; `dies` at the end."""

    rank: int
    role: str
    begin: float
    end: float
    dies: bool = False


@dataclass
class _Roles:
    """The shards and slots of ranks at a time, and the stays until then."""

    shards: dict[int, int]
    slots: dict[int, int]
    since: dict[int, tuple[str, float]] = field(default_factory=dict)
    stays: list[Stay] = field(default_factory=list)

    def at(self, time: float, live: Sequence[int], dead: Sequence[int] = ()) -> None:
        """The roles changed at `time`: `live` ranks go on, `dead` ranks end."""
        for rank in [rank for rank in self.since if rank not in live]:
            role, begin = self.since.pop(rank)
            self.stays.append(Stay(rank, role, begin, time, rank in dead))
        for rank in live:
            role, (before, begin) = self._role(rank), self.since.get(rank, ("", time))
            if role != before:
                if before:
                    self.stays.append(Stay(rank, before, begin, time))
                self.since[rank] = (role, time)

    def _role(self, rank: int) -> str:
        serves, trains = rank in self.shards.values(), rank in self.slots.values()
        return BOTH if serves and trains else SERVER if serves else TRAINER if trains else SPARE


def stays(events: Sequence[Event], ranks: Sequence[Mapping[str, Any]] = ()) -> list[Stay]:
    """The stays of all ranks, by rank and time.

    `ranks` are the entries of ranks.json. Roles after a reshape are known from ranks.json alone:
    the servers of an earlier reshape keep the roles before.
    """
    found: list[Stay] = []
    roles: _Roles | None = None
    live: list[int] = []
    reshapes = [at for at, event in enumerate(events) if event["event"] == "reshaped"]
    for number, event in enumerate(events):
        kind, time = event["event"], event["time"]
        if kind == "start":
            if roles is not None:
                roles.at(events[number - 1]["time"], ())
                found += roles.stays
            roles, live = _at_start(event, ranks), list(range(event["world_size"]))
            roles.at(time, live)
        elif roles is None:
            continue
        elif kind == "failure":
            live = [rank for rank in live if rank not in event["ranks"]]
            for moved in (event.get("shards", {}), event.get("moved", {})):
                roles.shards.update({int(shard): rank for shard, rank in moved.items()})
            roles.slots.update({int(slot): rank for slot, rank in event["slots"].items()})
            roles.at(time, live, event["ranks"])
        elif kind == "joined":
            live = sorted({*live, *event["ranks"]})
            roles.slots.update({int(slot): rank for slot, rank in event["slots"].items()})
            roles.at(time, live)
        elif kind == "reshaped" and number == reshapes[-1] and ranks:
            roles.shards = {int(s): entry["rank"] for entry in ranks for s in entry["shards"]}
            roles.at(time, live)
    if roles is not None:
        roles.at(events[-1]["time"], ())
        found += roles.stays
    return sorted(found, key=lambda stay: (stay.rank, stay.begin))


def _at_start(start: Event, ranks: Sequence[Mapping[str, Any]]) -> _Roles:
    config, world = start["config"], start["world_size"]
    cluster = config["cluster"]
    known = {each.name for each in fields(ProtectionConfig)}
    given = {name: value for name, value in config["protection"].items() if name in known}
    protection = ProtectionConfig(**given)
    k, m = KINDS[protection.name].stripes(protection)
    slots = config["train"]["slots"] or cluster["trainers"]
    names = [entry.get("failure_domain", "") for entry in ranks]
    domains = [names.index(name) for name in names] if len(names) == world else None
    per = KINDS[protection.name].shards_per_server(protection)
    shape = StripeShape(per * cluster["servers"], k, m)
    more = (cluster["trainers"], cluster["spares"], slots, 1)
    try:
        view = initial_view(cluster["layout"], shape, *more, domains, per)
    except CannotKeepApart:  # ranks.json is of a later start on fewer hosts
        view = initial_view(cluster["layout"], shape, *more, None, per)
    return _Roles(dict(enumerate(view.shards)), dict(enumerate(view.slots)))

"""The options of a drill, checked before anything is started or written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ecrm.base.errors import UsageError
from ecrm.base.wording import counted
from ecrm.config import Config
from ecrm.config.faults import Kill, parse_kill
from ecrm.protection.kinds import WITH_PARITY


@dataclass(frozen=True)
class RandomKills:
    """Random SIGKILLs from outside.

    Gaps between kills are exponential with the mean `mtbf_seconds`. `count` is the number of kills,
    `None` for no limit; `seed` decides gaps and ranks.
    """

    mtbf_seconds: float
    count: int | None = None
    seed: int = 0

    def __str__(self) -> str:
        count = "" if self.count is None else f" --kills {self.count}"
        return f"--mtbf {self.mtbf_seconds:g}{count} --seed {self.seed}"


@dataclass(frozen=True)
class HostKill:
    """Kill all ranks of `host`, a name or a number, from outside as step `step` begins."""

    host: str
    step: int

    def __str__(self) -> str:
        return f"{self.host}@{self.step}"

    def name_among(self, names: Sequence[str]) -> str:
        """The host meant, out of `names`, ordered by the lowest ranks of hosts.

        Raises UsageError for an unknown host.
        """
        if self.host in names:
            return self.host
        if self.host.isdecimal() and int(self.host) < len(names):
            return names[int(self.host)]
        raise UsageError(
            f"--kill-host {self}: there is no host {self.host}; hosts are {', '.join(names)}, "
            f"or 0 to {len(names) - 1}"
        )


@dataclass(frozen=True)
class Disturbance:
    """The disturbance of a run: `scheduled` kills, `random` kills, or whole `hosts`."""

    scheduled: tuple[Kill, ...] = ()
    random: RandomKills | None = None
    hosts: tuple[HostKill, ...] = ()

    def __str__(self) -> str:
        if self.random:
            return str(self.random)
        return " ".join(
            [
                *(f"--kill {kill}" for kill in self.scheduled),
                *(f"--kill-host {kill}" for kill in self.hosts),
            ]
        )


def parse_disturbance(
    kills: Sequence[str],
    mtbf: str | None,
    count: str | None,
    seed: str | None,
    hosts: Sequence[str] = (),
) -> Disturbance:
    """The disturbance described by --kill, --mtbf, --kills, --seed and --kill-host.

    Raises UsageError for options contradicting each other or impossible to read.
    """
    if hosts and (kills or mtbf is not None):
        other = f"--kill {kills[0]}" if kills else f"--mtbf {mtbf}"
        raise UsageError(f"--kill-host {hosts[0]} and {other}: type one or the other")
    if mtbf is None:
        for name, value in (("--kills", count), ("--seed", seed)):
            if value is not None:
                raise UsageError(f"{name} {value}: goes with --mtbf, which is not given")
        if hosts:
            wanted = tuple(_host_kill(text) for text in hosts)
            _once("--kill-host: host", [kill.host for kill in wanted], "host")
            return Disturbance(hosts=wanted)
        if not kills:
            raise UsageError(
                "a drill needs something to survive: type --kill RANK@STEP[:PHASE], "
                "--mtbf SECONDS, or --kill-host HOST@STEP"
            )
        scheduled = tuple(parse_kill(kill) for kill in kills)
        _once("--kill: rank", [kill.rank for kill in scheduled], "rank")
        return Disturbance(scheduled=scheduled)
    if kills:
        raise UsageError(f"--kill {kills[0]} and --mtbf {mtbf}: type one or the other")
    return Disturbance(
        random=RandomKills(
            mtbf_seconds=_seconds(mtbf),
            count=None if count is None else _whole("--kills", count, 1),
            seed=0 if seed is None else _whole("--seed", seed, 0),
        )
    )


def check_survivable(config: Config, disturbance: Disturbance, steps: int | None) -> None:
    """Raise UsageError for a disturbance impossible for this run of `steps` steps.

    `steps` is `None` for a script's run, before the script has told its number of steps. Impossible
    are random kills of a run surviving none, or too many random kills, host kills without hosts as
    failure domains, an unknown host number with imitated hosts, and host kills after the last step.
    """
    for kill in disturbance.hosts:
        if steps is not None and kill.step >= steps:
            raise UsageError(
                f"--kill-host {kill}: there is no step {kill.step} to follow, "
                f"the last is {steps - 1}"
            )
        imitated = config.testing.imitated_hosts
        if imitated and kill.host.isdecimal() and int(kill.host) >= imitated:
            raise UsageError(
                f"--kill-host {kill}: there is no host {kill.host}; hosts are 0 to {imitated - 1}"
            )
    if disturbance.hosts and config.cluster.failure_domain != "host":
        raise UsageError(
            "--kill-host: cluster.failure_domain is rank, so units of a stripe may share a host",
            {"cluster.failure_domain": "host"},
        )
    wanted = disturbance.random
    if wanted is None:
        return
    if config.failures_survived == 0 and not config.kind.rolls_back and not config.checkpoints:
        raise UsageError(
            f"--mtbf: protection.name is {config.protection.name}, no rank may die",
            WITH_PARITY,
        )
    if wanted.count is not None and wanted.count >= config.world_size:
        raise UsageError(
            f"--kills {wanted.count}: the config has {counted(config.world_size, 'rank')}, "
            "and one must be left"
        )


def _once(option: str, named: Sequence[int | str], noun: str) -> None:
    name, times = Counter(named).most_common(1)[0]
    if times > 1:
        raise UsageError(f"{option} {name} is to die {times} times, a {noun} dies once")


def _host_kill(text: str) -> HostKill:
    host, at, step = text.rpartition("@")
    if not at or not host or not step.isdecimal():
        raise UsageError(f"--kill-host {text}: type HOST@STEP, such as node3@40")
    return HostKill(host, int(step))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"--mtbf {text}: type a number of seconds above 0")
    return seconds


def _whole(name: str, text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise UsageError(f"{name} {text}: type a whole number, at least {least}")
    return number

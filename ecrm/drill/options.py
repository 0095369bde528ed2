"""What a drill was asked for, checked before anything is started or written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ecrm.config import Config
from ecrm.errors import UsageError
from ecrm.train.kill import Kill, parse_kill

LOG_EVERY_STEPS = 10
"""Most steps between two progress events of a drill's runs; step times not yet written die with the reporter."""


@dataclass(frozen=True)
class RandomKills:
    """SIGKILLs from outside: gaps exponential with mean `mtbf_seconds`, `count` of them (None: no limit), from `seed`."""

    mtbf_seconds: float
    count: int | None = None
    seed: int = 0

    def __str__(self) -> str:
        count = "" if self.count is None else f" --kills {self.count}"
        return f"--mtbf {self.mtbf_seconds:g}{count} --seed {self.seed}"


@dataclass(frozen=True)
class Disturbance:
    """How the disturbed run is disturbed: by `scheduled` kills, or by `random` ones."""

    scheduled: tuple[Kill, ...] = ()
    random: RandomKills | None = None

    def __str__(self) -> str:
        return str(self.random) if self.random else " ".join(f"--kill {kill}" for kill in self.scheduled)


def parse_disturbance(kills: Sequence[str], mtbf: str | None, count: str | None, seed: str | None) -> Disturbance:
    """The disturbance that the options --kill, --mtbf, --kills and --seed describe; raises UsageError."""
    if mtbf is None:
        for name, value in (("--kills", count), ("--seed", seed)):
            if value is not None:
                raise UsageError(f"{name} {value}: goes with --mtbf, which is not given")
        if not kills:
            raise UsageError("a drill needs something to survive: type --kill RANK@STEP[:PHASE], or --mtbf SECONDS")
        scheduled = tuple(parse_kill(kill) for kill in kills)
        rank, times = Counter(kill.rank for kill in scheduled).most_common(1)[0]
        if times > 1:
            raise UsageError(f"--kill: rank {rank} is to die {times} times, a rank dies once")
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


def check_survivable(config: Config, disturbance: Disturbance) -> None:
    """Raise UsageError when no random kill could ever be survived, or not so many."""
    wanted = disturbance.random
    if wanted is None:
        return
    if config.failures_survived == 0:
        raise UsageError("--mtbf: protection.name is none, no rank may die; type --set protection.name=erasure")
    if wanted.count is not None and wanted.count >= config.world_size:
        raise UsageError(f"--kills {wanted.count}: there are {config.world_size} ranks, and one must be left")


def with_step_times(config: Config, overrides: Sequence[str]) -> tuple[list[str], str | None]:
    """(overrides under which step times are written often enough, a note if that changes the config)."""
    every = config.train.log_every_steps
    if 0 < every <= LOG_EVERY_STEPS:
        return list(overrides), None
    note = f"train.log_every_steps is {LOG_EVERY_STEPS} in both runs ({every} in the config), so that step times survive"
    return [*overrides, f"train.log_every_steps={LOG_EVERY_STEPS}"], note


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

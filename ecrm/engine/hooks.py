"""What an engine is told when it is made, what it tells meanwhile, and the exceptions by which it ends a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


class StepAborted(Exception):
    """Ranks died; the survivors have recovered and stand at the last commit. Start again from `engine.step`."""


class StopAgreed(Exception):
    """A rank asks to stop; every live rank has heard it and stands at the same commit."""


@dataclass(frozen=True)
class EnginePolicy:
    """How often to commit, how much to rebuild per step, how many dense replicas to keep, how much to scrub per step,
    whether to re-lay everything over fewer shards when the ranks left cannot keep stripe members apart.
    """

    commit_interval: int = 1
    rebuild_rows_per_step: int = 4096
    dense_replicas: int = 1
    scrub_rows_per_step: int = 0
    reshape: bool = True


def _ignore(*_: object) -> None:
    """Default hook."""


def _never() -> bool:
    """Default for a question."""
    return False


@dataclass
class Hooks:
    """What the engine tells the outside: `phase(step, name)` as each begins, `event(fields)` when something happened,
    `committed()` once this rank has accepted a commit, `recovered()` once a recovery is through, `troubled(step, {slot: trouble})`
    what slots told of a step, the same on all ranks: it may raise an EcrmError to end the run on all of them.

    And what it asks: `asks()`, whether this rank wants all to stop; asked again and again, from any
    rank.
    """

    phase: Callable[[int, str], None] = _ignore
    event: Callable[[dict[str, object]], None] = _ignore
    committed: Callable[[], None] = _ignore
    recovered: Callable[[], None] = _ignore
    troubled: Callable[[int, Mapping[int, str]], None] = _ignore
    asks: Callable[[], bool] = _never

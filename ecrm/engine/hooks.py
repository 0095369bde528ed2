"""An engine's settings, its hooks, and the exceptions by which it ends a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ecrm.engine.slot_faults import Place


class StepAborted(Exception):
    """Ranks died and the survivors stand at the last commit. Start again from `engine.step`."""


class StopAgreed(Exception):
    """A rank asks to stop; every live rank has heard it and stands at the same commit."""


@dataclass(frozen=True)
class EnginePolicy:
    """How often to commit, and how much to rebuild, to replicate and to scrub.

    `commit_interval` is in steps; `rebuild_rows_per_step` and `scrub_rows_per_step` are rows of
    each shard; `dense_replicas` counts failure domains. With `reshape` everything is laid out anew
    over fewer shards where the ranks left cannot keep the members of a stripe apart.
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


def _nowhere(rank: int) -> tuple[Place, ...]:
    """Default for a question, where user code has no part in slots."""
    return ()


@dataclass
class Hooks:
    """What the engine tells the outside, and the questions that it asks.

    - `phase(step, name)`: a phase begins.
    - `event(fields)`: something happened.
    - `committed()`: this rank has accepted a commit.
    - `recovered()`: a recovery is through.
    - `troubled(step, {slot: trouble})`: what slots told of a step, the same on all ranks. It may
      raise an EcrmError to end the run on all of them.
    - `skipped(step, {slot: trouble})`: the same, of a step that is skipped for it.
    - `asks()`: whether this rank wants all to stop. It is asked again and again, on any rank.
    - `whereabouts(rank)`: what user code was at work on when a rank died; None where this rank
      cannot know.
    """

    phase: Callable[[int, str], None] = _ignore
    event: Callable[[dict[str, object]], None] = _ignore
    committed: Callable[[], None] = _ignore
    recovered: Callable[[], None] = _ignore
    troubled: Callable[[int, Mapping[int, str]], None] = _ignore
    skipped: Callable[[int, Mapping[int, str]], None] = _ignore
    asks: Callable[[], bool] = _never
    whereabouts: Callable[[int], tuple[Place, ...] | None] = _nowhere

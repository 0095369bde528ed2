"""Settings and hooks of an engine, and the exceptions ending a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ecrm.engine.events import Event
from ecrm.engine.inquest import Inquest
from ecrm.transport.message import Received


class StepAborted(Exception):
    """After a recovery, the survivors are at the last commit. Start again from `engine.step`."""


class StopRequested(Exception):
    """A rank asks to stop; every live rank knows of the request, and is before the same step."""


@dataclass(frozen=True)
class EnginePolicy:
    """How often to commit, and how much to rebuild, to replicate and to scrub.

    `commit_interval` is in steps; `rebuild_rows_per_step` and `scrub_rows_per_step` are rows per
    shard. `rebuild_share` and `rebuild_rows_per_step` are for `RebuildPace`. `dense_replicas`
    counts failure domains. With `reshape` everything is laid out anew over fewer shards once the
    surviving ranks cannot keep the members of a stripe apart.
    """

    commit_interval: int = 1
    rebuild_rows_per_step: int = 0
    rebuild_share: float = 0.05
    dense_replicas: int = 1
    scrub_rows_per_step: int = 0
    reshape: bool = True


class Introductions:
    """What ranks tell each other when ranks join a run under way, as JSON; by default nothing.

    Called on every rank, newcomers included, in the order of the methods. After a death meanwhile
    all ranks begin again.
    """

    def about(self) -> Any:
        """Facts of this process, for all ranks."""
        return None

    def meet(self, facts: Mapping[int, Any]) -> Any:
        """Take the facts of all ranks, by rank; returns an answer for all ranks."""
        return None

    def met(self, answers: Mapping[int, Any]) -> None:
        """Take the answers of all ranks, by rank."""


def _ignore(*_: object) -> None:
    """Default hook."""


def _never() -> bool:
    """Default for a question."""
    return False


def _no_marks(step: int) -> Mapping[int, int]:
    """Default for a question, for batches without digests."""
    return {}


def _unchanged(step: int, requests: Mapping[int, Sequence[Received]]) -> str:
    """Default for a question, for requests never compared."""
    return ""


@dataclass
class Hooks:
    """Reports of the engine to the outside, and questions asked by the engine.

    - `phase(step, name)`: a phase begins.
    - `event(told)`: an event, see `ecrm/engine/events.py`.
    - `committed()`: this rank has accepted a commit.
    - `recovered()`: a recovery is finished.
    - `troubled(step, {slot: trouble})`: troubles told by slots in a step, the same on all ranks.
      May raise an EcrmError to end the run on all ranks.
    - `skipped(step, {slot: trouble})`: the same, for a step skipped because of the troubles.
    - `marks(step)`: digests of this rank's batches for a step, by slot; sent with the requests.
    - `changed(step, requests)`: the first difference of `requests`, by rank, from earlier requests
      for the same step, in words; "" for no difference. Ends the run on all ranks.
    - `asks()`: whether this rank wants all ranks to stop. Asked again and again, on any rank.
    - `inquest`: judges the ends of ranks, in every recovery.
    - `introductions`: makes ranks that have joined and the other ranks known to each other.
    """

    phase: Callable[[int, str], None] = _ignore
    event: Callable[[Event], None] = _ignore
    committed: Callable[[], None] = _ignore
    recovered: Callable[[], None] = _ignore
    troubled: Callable[[int, Mapping[int, str]], None] = _ignore
    skipped: Callable[[int, Mapping[int, str]], None] = _ignore
    marks: Callable[[int], Mapping[int, int]] = _no_marks
    changed: Callable[[int, Mapping[int, Sequence[Received]]], str] = _unchanged
    asks: Callable[[], bool] = _never
    inquest: Inquest = field(default_factory=Inquest)
    introductions: Introductions = field(default_factory=Introductions)

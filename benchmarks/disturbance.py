"""What one run cost, and what a kill cost it, from its record. Pure: records in, numbers out; times in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ecrm.drill.record import RunRecord
from ecrm.drill.throughput import Span, spans


@dataclass(frozen=True)
class Calm:
    """Steps before the kill: how many, `step_seconds` of an average one without the time in which training waited for a checkpoint,
    and `step_seconds_seen` with it."""

    steps: int
    step_seconds: float
    step_seconds_seen: float


@dataclass(frozen=True)
class Cost:
    """What a kill cost: `gap` between the last step finished before it and the first finished after; `lost`, between the last step
    finished before and the first new one after, less an average step; `redone` steps; `whole_after` the kill nothing was missing any more, None
    where only the end of the run made it so; throughput kept, as a share of that before: `kept_recovering` from the kill until
    everything lost was back and every undone step done again, `kept_rebuilding` the part of that after the gap, None if there is none."""

    gap: float
    lost: float
    recovery: float
    redone: int
    whole_after: float | None
    kept_recovering: float
    kept_rebuilding: float | None


def calm(record: RunRecord, warm: int, until: int, checkpoints: Sequence[Mapping[str, Any]]) -> Calm:
    """The steps after the first `warm` that were finished before step `until` began and before any failure.

    `checkpoints` are the run's events of that kind. Raises ValueError when there is no such step.
    """
    began = min((failure.began_at for failure in record.failures if failure.began_at is not None), default=float("inf"))
    finished = {end: step for step, end in record.finished}
    mine = [span for span in spans(record) if warm < finished[span.end] <= until and span.end <= began]
    steps, seconds = sum(span.steps for span in mine), sum(span.seconds for span in mine)
    if not steps:
        raise ValueError(f"no step between {warm} and {until} was finished before the kill")
    within = [event for event in checkpoints if any(span.begin <= event["time"] <= span.end for span in mine)]
    waited = sum(event["stall_seconds"] for event in within)
    return Calm(steps, (seconds - waited) / steps, seconds / steps)


def cost(record: RunRecord, before: Calm) -> Cost:
    """What the only failure of the run cost. Raises ValueError where the run did not have one, with steps before and after it."""
    if len(record.failures) != 1:
        raise ValueError(f"{len(record.failures)} failures instead of one")
    (failure,) = record.failures
    began, every = failure.began_at, spans(record)
    hit = next((place for place, span in enumerate(every) if span.begin <= began < span.end), None)
    if hit is None:
        raise ValueError("the kill came before the second step or after the last")
    caught_up = next((span for span in every[hit:] if span.steps), None)
    if caught_up is None:
        raise ValueError("no new step was finished after the kill")
    last = every[-1].end
    whole = failure.whole_at
    ended = max(caught_up.end, min(whole if whole is not None else last, last))
    recovering = [span for span in every[hit:] if span.begin < ended]
    rebuilding = [span for span in recovering if span.begin >= caught_up.end]
    return Cost(
        gap=every[hit].seconds,
        lost=caught_up.end - every[hit].begin - before.step_seconds,
        recovery=failure.recovery_seconds,
        redone=failure.redone_steps,
        whole_after=whole - began if whole is not None and whole <= last else None,
        kept_recovering=_rate(recovering) * before.step_seconds_seen,
        kept_rebuilding=_rate(rebuilding) * before.step_seconds_seen if rebuilding else None,
    )


def _rate(found: Sequence[Span]) -> float:
    """New steps per second."""
    return sum(span.steps for span in found) / sum(span.seconds for span in found)


def timeline(record: RunRecord) -> list[tuple[float, float, int]]:
    """(begin, end, new steps) of every span of the run, relative to the kill, or to the start where there was none."""
    origin = record.failures[0].began_at if record.failures else record.started_at
    return [(span.begin - origin, span.end - origin, span.steps) for span in spans(record)]

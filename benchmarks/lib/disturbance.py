"""What one run cost, and what a kill cost it. Pure: records in, numbers out; times in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ecrm.drill.run_record import RunRecord
from ecrm.drill.throughput import Span, spans


@dataclass(frozen=True)
class Calm:
    """Steps before the kill.

    `step_seconds` of an average one contain waiting for checkpoints. `waiting` is the seconds of
    all of them that were spent so.
    """

    steps: int
    step_seconds: float
    waiting: float


@dataclass(frozen=True)
class Cost:
    """What a kill cost.

    `gap`: from the last step finished before it to the first finished after it.
    `lost`: from the last step before it to the first new one after it, less an average step. In
    this time nothing new was trained.
    `lost_whole`: all time lost until everything was rebuilt and every undone step was redone,
    slower steps included.
    `redone`: steps done again.
    `whole_after`: from the kill until everything was rebuilt; None where the run ended before.
    `kept_recovering`: throughput over the time of `lost_whole`, as a share of undisturbed steps.
    `kept_rebuilding`: the same for the part after the gap; None if there is none.
    """

    gap: float
    lost: float
    lost_whole: float
    recovery: float
    redone: int
    whole_after: float | None
    kept_recovering: float
    kept_rebuilding: float | None


def calm(
    record: RunRecord, first: int, until: int, checkpoints: Sequence[Mapping[str, Any]]
) -> Calm:
    """The steps after step `first` up to `until`, finished before any failure.

    `checkpoints` are the run's events of that kind. Raises ValueError where a step is missing.
    """
    began = min(
        (failure.began_at for failure in record.failures if failure.began_at is not None),
        default=float("inf"),
    )
    finished = {end: step for step, end in record.finished}
    mine = [
        span for span in spans(record) if first < finished[span.end] <= until and span.end <= began
    ]
    steps, seconds = sum(span.steps for span in mine), sum(span.seconds for span in mine)
    if steps != until - first:
        raise ValueError(f"{steps} steps after {first} up to {until} were finished before the kill")
    waiting = sum(event["stall_seconds"] for event in checkpoints if first < event["step"] <= until)
    return Calm(steps, seconds / steps, waiting)


def around_a_checkpoint(
    finished: Sequence[tuple[int, float]], step: int, every: int, until: float
) -> tuple[float, float]:
    """What a checkpoint at `step` cost the `every` steps from there to the next one.

    Returns by how many seconds these steps took longer than if all had been like those that began
    after `until`, and the seconds of one such step. `finished` are (step, time) of the run. Raises
    ValueError if a step is missing, or if fewer than half of the steps began after `until`.
    """
    at = dict(finished)
    if missing := [number for number in range(step, step + every + 1) if number not in at]:
        raise ValueError(f"step {missing[0]} was not finished")
    calm_steps = [number for number in range(step, step + every) if at[number] >= until]
    if 2 * len(calm_steps) < every:
        raise ValueError(
            f"only {len(calm_steps)} of {every} steps after step {step} began after its "
            "checkpoint: write them less often"
        )
    usual_seconds = (at[step + every] - at[calm_steps[0]]) / len(calm_steps)
    return at[step + every] - at[step] - every * usual_seconds, usual_seconds


def usual(record: RunRecord, before: Calm) -> float:
    """Seconds of an average undisturbed step, before the only failure and after its rebuilding.

    Both, since a shared machine changes its pace within a run.
    """
    (failure,) = record.failures
    after = [
        span
        for span in spans(record)
        if failure.whole_at is not None and span.begin >= failure.whole_at
    ]
    seconds = before.steps * before.step_seconds + sum(span.seconds for span in after)
    return seconds / (before.steps + sum(span.steps for span in after))


def cost(record: RunRecord, step_seconds: float) -> Cost:
    """What the only failure of the run cost, beside steps of `step_seconds`.

    Raises ValueError where the run did not have one failure, with steps before and after it.
    """
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
        lost=caught_up.end - every[hit].begin - step_seconds,
        lost_whole=sum(span.seconds for span in recovering)
        - sum(span.steps for span in recovering) * step_seconds,
        recovery=failure.recovery_seconds,
        redone=failure.redone_steps,
        whole_after=whole - began if whole is not None and whole <= last else None,
        kept_recovering=_rate(recovering) * step_seconds,
        kept_rebuilding=_rate(rebuilding) * step_seconds if rebuilding else None,
    )


def _rate(found: Sequence[Span]) -> float:
    """New steps per second."""
    return sum(span.steps for span in found) / sum(span.seconds for span in found)


def timeline(record: RunRecord) -> list[tuple[float, float, int]]:
    """(begin, end, new steps) of every span, relative to the kill, or to the start without one."""
    origin = record.failures[0].began_at if record.failures else record.started_at
    return [(span.begin - origin, span.end - origin, span.steps) for span in spans(record)]

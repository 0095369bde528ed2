"""Useful throughput, from the times at which steps finished. All times are in seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ecrm.drill.run_record import FailureRecord, RunRecord

BUCKETS = 80
"""Approximate number of buckets of the longer run."""

STEPS_PER_BUCKET = 3
"""The least number of undisturbed steps in a bucket.

With fewer steps the line would show the beat of the steps, not throughput.
"""


@dataclass(frozen=True)
class Span:
    """The time from one finishing of a step to the next.

    `steps` is the number of steps finished for the first time at the end of the span. `steps` is 0
    if an undone step was finished again, and more than 1 if times in between were lost.
    """

    begin: float
    end: float
    steps: int

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Pace:
    """Useful steps over a time.

    `steps_per_second` is `None` without any such time, `samples_per_second` also if the number of
    samples in a step is unknown.
    """

    steps: int
    seconds: float
    steps_per_second: float | None
    samples_per_second: float | None


def spans(record: RunRecord) -> list[Span]:
    """The times between finished steps, without evaluations.

    The first step, which warms everything up, is in no span.
    """
    found = []
    newest = record.finished[0][0] if record.finished else 0
    for (step, before), (after, end) in zip(record.finished, record.finished[1:], strict=False):
        begin = max([before, *_evaluations_after(record, step, before, end)])
        found.append(Span(begin, end, max(after - newest, 0)))
        newest = max(newest, after)
    return found


def _evaluations_after(record: RunRecord, step: int, begin: float, end: float) -> list[float]:
    """When evaluations between two steps were done.

    An evaluation interrupted by a failure counts as training time.
    """
    disturbed = any(f.began_at is not None and begin <= f.began_at <= end for f in record.failures)
    return [
        time
        for at, time in record.evaluations
        if at == step and begin < time < end and not disturbed
    ]


def open_times(failures: Sequence[FailureRecord]) -> list[tuple[float, float]]:
    """When the run was not whole: (begin, end), ascending, overlapping times merged.

    The last end may be infinite.
    """
    merged: list[tuple[float, float]] = []
    known = [
        (f.began_at, math.inf if f.whole_at is None else f.whole_at)
        for f in failures
        if f.began_at is not None
    ]
    for begin, end in sorted(known):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def pace(found: Sequence[Span], global_batch: int | None) -> Pace:
    """The pace of all given spans together; `global_batch` is `None` if its samples are unknown."""
    steps, seconds = sum(span.steps for span in found), sum(span.seconds for span in found)
    rate = steps / seconds if seconds > 0 else None
    samples = None if rate is None or global_batch is None else steps * global_batch / seconds
    return Pace(steps, seconds, rate, samples)


def before_during_after(record: RunRecord, global_batch: int | None) -> dict[str, Pace]:
    """The pace "before" the first failure, "during" failures, and "after", once whole again.

    "during" is while rows of any failure were missing. A span with a failure inside counts as
    "during" as a whole, to include the stall. Without failures everything is "before".
    """
    times = open_times(record.failures)
    parts: dict[str, list[Span]] = {"before": [], "during": [], "after": []}
    for span in spans(record):
        if any(begin < span.end and span.begin < end for begin, end in times):
            parts["during"].append(span)
        else:
            parts["after" if times and times[0][0] < span.end else "before"].append(span)
    return {name: pace(part, global_batch) for name, part in parts.items()}


def bucket_seconds(duration: float, step_seconds: float) -> float:
    """A round width (1, 2 or 5 times a power of ten) for the buckets of a time line."""
    least = max(duration / BUCKETS, STEPS_PER_BUCKET * step_seconds, 1e-3)
    power = 10.0 ** math.floor(math.log10(least))
    return next(
        width for width in (power, 2 * power, 5 * power, 10 * power) if width >= least * (1 - 1e-9)
    )


def bucket_rates(
    found: Sequence[Span], origin: float, width: float, global_batch: int | None
) -> list[float | None]:
    """Samples per second, or steps per second without a `global_batch`, in each bucket.

    Buckets are `width` seconds wide, from `origin` on. A bucket without a running step has `None`.
    The steps of a span are spread evenly over its time. The last bucket reaches to the end of the
    last span, with a half to one and a half times the width, so that no single step makes a peak of
    its own.
    """
    if not found:
        return []
    count = max(round((found[-1].end - origin) / width), 1)
    edges = [*(origin + i * width for i in range(count)), max(span.end for span in found)]
    steps, covered = [0.0] * count, [0.0] * count
    for span in found:
        first = min(max(int((span.begin - origin) / width), 0), count - 1)
        for bucket in range(first, min(int((span.end - origin) / width) + 1, count)):
            overlap = min(span.end, edges[bucket + 1]) - max(span.begin, edges[bucket])
            if overlap > 0:
                steps[bucket] += span.steps * overlap / span.seconds
                covered[bucket] += overlap
    return [
        done * (global_batch or 1) / seconds if seconds > 1e-9 else None
        for done, seconds in zip(steps, covered, strict=True)
    ]

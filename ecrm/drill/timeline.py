"""The numbers behind the picture. Times are in seconds since the start of each run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from ecrm.drill.run_record import Pause, RunRecord
from ecrm.drill.throughput import bucket_rates, bucket_seconds, open_times, spans

Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Timeline:
    """Both runs over time, or a single run as the disturbed run.

    - `seconds`: the time of the last thing to show.
    - `last_steps`: when each run's last step was finished.
    - `undisturbed`, `disturbed`: samples, or steps, per second in each bucket, `None` without a
      running step.
    - `kills`: (time, rank) of each kill.
    - `rebuilt`: curves of (time, share rebuilt).
    - `pauses`: evaluations and checkpoints of the disturbed run.
    """

    bucket_seconds: float
    seconds: float
    last_steps: tuple[float, float]
    undisturbed: tuple[float | None, ...]
    disturbed: tuple[float | None, ...]
    kills: tuple[tuple[float, int], ...]
    rebuilt: tuple[Curve, ...]
    pauses: tuple[Pause, ...]


def timeline(undisturbed: RunRecord, disturbed: RunRecord, global_batch: int | None) -> Timeline:
    """The time lines of both runs, each laid from its own start.

    For a single run, `undisturbed` is an empty record.
    """
    began = disturbed.started_at or 0.0
    kills = tuple(
        (time - (disturbed.started_at or time), rank) for time, rank in kill_times(disturbed)
    )
    curves = tuple(
        tuple((time - (disturbed.started_at or time), share) for time, share in curve)
        for curve in rebuild_curves(disturbed)
    )
    ends = (_end(undisturbed), _end(disturbed))
    seconds = max(
        [*ends, *(time for time, _ in kills), *(time for curve in curves for time, _ in curve)]
    )
    steady = undisturbed if undisturbed.finished else disturbed
    lengths = [span.seconds for span in spans(steady) if span.steps]
    width = bucket_seconds(seconds, statistics.median(lengths) if lengths else 0.0)

    def rates(run: RunRecord) -> tuple[float | None, ...]:
        return tuple(bucket_rates(spans(run), run.started_at or 0.0, width, global_batch))

    pauses = tuple(
        Pause(pause.kind, pause.begin - began, pause.end - began) for pause in disturbed.pauses
    )
    return Timeline(
        width, seconds, ends, rates(undisturbed), rates(disturbed), kills, curves, pauses
    )


def _end(run: RunRecord) -> float:
    """When the last step was finished; 0 without a finished step."""
    if not run.finished or run.started_at is None:
        return 0.0
    return run.finished[-1][1] - run.started_at


def kill_times(record: RunRecord) -> list[tuple[float, int]]:
    """(seconds since the epoch, rank) of every kill.

    A death without a known kill counts as a kill at the time of notice.
    """
    known = {kill.rank for kill in record.kills}
    found = [(kill.time, kill.rank) for kill in record.kills]
    found += [
        (failure.noticed_at, rank)
        for failure in record.failures
        for rank in failure.ranks
        if rank not in known and failure.noticed_at is not None
    ]
    return sorted(found)


def rebuild_curves(record: RunRecord) -> list[Curve]:
    """A curve for each time with missing rows.

    Points are (seconds since the epoch, share of the lost rows recovered), ascending. The share is
    known at each progress event. A failure in between adds its shards, with no row recovered.
    """
    losing = [failure for failure in record.failures if failure.shards]
    last = max([time for _, time in record.finished], default=0.0)
    curves = []
    for begin, end in open_times(losing):
        lost = [
            (began, set(failure.shards))
            for failure in losing
            if (began := failure.began_at) is not None and begin <= began <= end
        ]
        samples = [(time, share) for time, share in record.rebuilt if begin < time < end]
        happened: list[tuple[float, set[int] | float]] = [*lost, *samples]
        points: list[tuple[float, float]] = []
        missing: set[int] = set()
        share = 0.0
        for time, what in sorted(happened, key=lambda point: point[0]):
            if isinstance(what, set):
                points.append((time, share))
                share *= len(missing - what) / len(missing | what)
                missing |= what
            else:
                share = what
            points.append((time, share))
        closing = (end, 1.0) if end < float("inf") else (max(last, points[-1][0]), share)
        curves.append((*points, closing))
    return curves

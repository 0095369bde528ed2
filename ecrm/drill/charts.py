"""The charts of a drill and of a report. Pure: records of runs in, charts out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ecrm.base.wording import named
from ecrm.drill.run_record import RunRecord
from ecrm.drill.svg import Area, Band, Chart, Line, Mark
from ecrm.drill.timeline import Timeline

NAMED_KILLS = 12
"""Most deaths with labels such as "rank 3"; more deaths are labelled "3"."""
TOGETHER = 0.004
"""Deaths within this share of the time have a common mark."""
ROOM = 1.02
"""The length of a time line as a multiple of the time shown."""


def throughput(line: Timeline, unit: str, until: float = 0.0) -> Chart:
    """Throughput over time, of two runs or of a single run, with the reasons for its gaps.

    Evaluations, checkpoints, deaths and rebuilding are those of the disturbed run. The chart goes
    on to `until` seconds at least.
    """
    seconds = max(line.seconds, line.bucket_seconds, until) * ROOM
    tracks = [("undisturbed run", line.undisturbed, line.last_steps[0], "calm", 1.6)]
    tracks.append(("disturbed run", line.disturbed, line.last_steps[1], "run", 2.2))
    if not line.undisturbed:
        tracks = [("throughput", *tracks[1][1:])]
    lines = [
        Line(name, _stairs(rates, line.bucket_seconds, end), colour, width, stairs=True)
        for name, rates, end, colour, width in tracks
    ]
    return Chart(
        about=f"throughput over {seconds:.0f} seconds, with {len(line.kills)} deaths",
        x="seconds since the start",
        y=f"{unit}, per {line.bucket_seconds:g} s",
        end=seconds,
        lines=lines,
        areas=[
            Area("lost rows rebuilt, from none to all" if not number else "", curve, "rebuilt")
            for number, curve in enumerate(line.rebuilt)
        ],
        bands=[
            Band(each.kind, each.begin, min(each.end, seconds), each.kind)
            for each in line.pauses
            if each.begin < seconds
        ],
        marks=deaths(line.kills, seconds),
        height=240,
    )


def deaths(kills: Sequence[tuple[float, int]], seconds: float) -> list[Mark]:
    """A mark for each death of (time, rank); a common mark for ranks that died together."""
    groups: list[tuple[float, list[int]]] = []
    for time, rank in kills:
        if groups and time - groups[-1][0] < TOGETHER * seconds:
            groups[-1][1].append(rank)
        else:
            groups.append((time, [rank]))
    few = len(kills) <= NAMED_KILLS
    return [
        Mark(
            "death, with the rank",
            time,
            named("rank", sorted(ranks)) if few else ", ".join(map(str, sorted(ranks))),
        )
        for time, ranks in groups
    ]


def curves(record: RunRecord) -> list[Chart]:
    """A chart for each value logged in training or reported by evaluations, over steps."""
    charts = []
    kinds = (("train", record.logged, "run"), ("evaluation", record.reported, "evaluation"))
    for group, told, colour in kinds:
        for name in dict.fromkeys(name for _, values in told for name in values):
            points = _newest((step, values[name]) for step, values in told if name in values)
            known = [value for _, value in points if value is not None]
            if len(known) > 1 and len(set(known)) > 1:
                charts.append(
                    Chart(
                        about=f"{name} over {points[-1][0]} steps",
                        x="step",
                        y=f"{group}: {name}",
                        end=max(points[-1][0], record.last_step),
                        lines=[Line(name, points, colour)],
                        height=150,
                        from_zero=False,
                    )
                )
    return charts


def _newest(
    told: Iterable[tuple[int, float | None]],
) -> list[tuple[float, float | None]]:
    """The values by step, in order; of a step done again, the last value."""
    return sorted({float(step): value for step, value in told}.items())


def _stairs(
    rates: Sequence[float | None], width: float, end: float
) -> list[tuple[float, float | None]]:
    """Stairs through the rates of buckets; the last bucket ends with the run."""
    points: list[tuple[float, float | None]] = [
        (number * width, rate) for number, rate in enumerate(rates)
    ]
    if points:
        points.append((max(end, points[-1][0]), points[-1][1]))
    return points

"""The course of one run, put together from its events and its summary. Reads no file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ecrm.run.reading import Event

Values = Mapping[str, float | None]
"""Values by name; `None` for an undefined value."""


@dataclass(frozen=True)
class KillDone:
    """One SIGKILL.

    `time` is in seconds since the epoch. `scheduled` is the `--kill` or `--kill-host` behind the
    kill, `None` for a random kill. Without a pid the rank killed itself, as in `ecrm launch
    --kill`.
    """

    time: float
    rank: int
    scheduled: str | None = None
    pid: int | None = None
    waited_seconds: float = 0.0


@dataclass(frozen=True)
class FailureRecord:
    """One failure survived by the run.

    `None` means not written, because the writer died, or not reached before the end of the run.

    - `step`, `phase`: where the survivors noticed.
    - `noticed_at`, `whole_at`: seconds since the epoch, the latter when no row lost by this failure
      was missing any more.
    - `lost_bytes`: bytes of the lost shards' rows, optimizer state and parity, also of rows never
      updated, with nothing to rebuild.
    """

    ranks: tuple[int, ...]
    step: int
    phase: str
    killed_at: float | None
    noticed_at: float | None
    recovery_seconds: float
    stall_seconds: float | None
    redone_steps: int
    shards: tuple[int, ...]
    rebuild_seconds: float | None
    whole_at: float | None
    lost_bytes: int | None
    on_demand_rows: int | None

    @property
    def began_at(self) -> float | None:
        """When the disturbance began, in seconds since the epoch.

        The begin is the kill, or the time of notice for an unknown kill.
        """
        return self.killed_at if self.killed_at is not None else self.noticed_at


@dataclass(frozen=True)
class ReshapeRecord:
    """Everything was laid out anew before `step`, over `servers` servers in stripes of k + m.

    `time` is the end of the reshape, in seconds since the epoch; `seconds` is how long training
    waited, and `moved_bytes` counts the bytes of all rows ever updated, each row once.
    """

    time: float
    step: int
    servers: int
    k: int
    m: int
    seconds: float
    moved_bytes: int


@dataclass(frozen=True)
class Pause:
    """A time in which training waited, or was slower, for a reason: not a gap of a failure.

    `kind` is `evaluation` or `checkpoint`. Times are in seconds since the epoch, or since the start
    of a run.
    """

    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint on disk: `time` is the end of writing, in seconds since the epoch."""

    time: float
    step: int
    kind: str
    rows: int
    bytes: int
    seconds: float
    stall_seconds: float


@dataclass(frozen=True)
class RunRecord:
    """One run, as far as told by its events and its summary.

    `finished`: (step, seconds since the epoch) of every finishing of a step, in order of time.
    `rebuilt`: (seconds since the epoch, share of lost rows recovered); `evaluations`: (step, time
    of the event). `logged` and `reported`: (step, values by name) of progress and of evaluations.
    `damaged_lines` counts unreadable lines of events.jsonl.
    """

    started_at: float | None = None
    start: Event = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    finished: tuple[tuple[int, float], ...] = ()
    failures: tuple[FailureRecord, ...] = ()
    kills: tuple[KillDone, ...] = ()
    rebuilt: tuple[tuple[float, float], ...] = ()
    evaluations: tuple[tuple[int, float], ...] = ()
    checkpoints: tuple[CheckpointRecord, ...] = ()
    logged: tuple[tuple[int, Values], ...] = ()
    reported: tuple[tuple[int, Values], ...] = ()
    reshapes: tuple[ReshapeRecord, ...] = ()
    damaged_lines: int = 0

    @property
    def completed(self) -> bool:
        """Whether the run came to its end."""
        return self.summary.get("completed") is True

    @property
    def pauses(self) -> list[Pause]:
        """Evaluations, and waits for checkpoints, in order.

        An evaluation begins with the last step before. The pause of an asynchronous checkpoint is
        its whole time, without a word on the share in which training waited.
        """
        found = [
            Pause("checkpoint", each.time - each.seconds, each.time) for each in self.checkpoints
        ]
        evaluated = {step for step, _ in self.evaluations}
        ends = [pair for pair in self.finished if pair[0] in evaluated]
        for step, time in self.evaluations:
            before = [at for done, at in ends if done == step and at <= time]
            others = [pause.end for pause in found if before and before[-1] < pause.end <= time]
            found.append(Pause("evaluation", max([*before[-1:], *others], default=time), time))
        return sorted(found, key=lambda pause: pause.begin)

    @property
    def unused_spares(self) -> dict[int, int]:
        """Resident memory, in bytes, of each rank without a role at the end of the run."""
        ranks = self.summary.get("memory_bytes_per_rank", [])
        return {entry["rank"]: entry["resident"] for entry in ranks if entry.get("unused_spare")}

    def since_start(self, time: float | None) -> float | None:
        """Seconds from the start of the run to a time in seconds since the epoch."""
        return None if time is None or self.started_at is None else time - self.started_at

    @property
    def last_step(self) -> int:
        """Number of steps known to be finished by the run."""
        steps: int = self.summary.get("steps", 0)
        return max([steps, *(step for step, _ in self.finished)])

    @property
    def unwritten_steps(self) -> int:
        """Number of finished steps with times lost by the death of a reporter."""
        return self.last_step - len({step for step, _ in self.finished})


def run_record(
    events: Sequence[Event],
    summary: dict[str, Any],
    outside: Sequence[KillDone] = (),
    damaged_lines: int = 0,
) -> RunRecord:
    """Put a run together; `outside` are the kills from outside the run."""
    of = {
        kind: [event for event in events if event["event"] == kind]
        for kind in {event["event"] for event in events}
    }
    own = [
        KillDone(event["time"], event["rank"], event["scheduled"]) for event in of.get("kill", [])
    ]
    kills = sorted([*own, *outside], key=lambda kill: kill.time)
    finished = sorted(
        ((step, time) for event in of.get("progress", []) for step, time in event["finished"]),
        key=lambda pair: pair[1],
    )
    start = next(iter(of.get("start", [])), {})
    return RunRecord(
        started_at=start.get("time", finished[0][1] if finished else None),
        start=start,
        summary=summary,
        finished=tuple(finished),
        failures=_failures(of, summary.get("failures", []), kills, finished),
        kills=tuple(kills),
        rebuilt=tuple((event["time"], event["rebuilt"]) for event in of.get("progress", [])),
        evaluations=tuple((event["step"], event["time"]) for event in of.get("evaluation", [])),
        checkpoints=tuple(
            CheckpointRecord(
                **{name: event[name] for name in CheckpointRecord.__dataclass_fields__}
            )
            for event in of.get("checkpoint", [])
        ),
        logged=tuple(
            (event["step"], event["logged"])
            for event in of.get("progress", [])
            if "logged" in event
        ),
        reported=tuple(
            (event["step"], event.get("values", {})) for event in of.get("evaluation", [])
        ),
        reshapes=tuple(
            ReshapeRecord(**{name: event[name] for name in ReshapeRecord.__dataclass_fields__})
            for event in of.get("reshaped", [])
        ),
        damaged_lines=damaged_lines,
    )


def _failures(
    of: dict[str, list[Event]],
    summarised: Sequence[dict[str, Any]],
    kills: Sequence[KillDone],
    finished: Sequence[tuple[int, float]],
) -> tuple[FailureRecord, ...]:
    """Join failure, resumed and rebuilt events with the summary's list of failures.

    A failure is known by its ranks, and by its number among failures of these ranks: a rank may
    join again, and die again.
    """
    written, known = _numbered(of.get("failure", [])), _numbered(summarised)
    resumed, rebuilt = (
        {_failure_before(event, written): event for event in of.get(kind, [])}
        for kind in ("resumed", "rebuilt")
    )
    failures = []
    for which in {**known, **written}:
        (ranks, number), event, entry = which, written.get(which), known.get(which, {})
        before = written.get((ranks, number - 1), {"time": float("-inf")})["time"]
        killed_at = {kill.rank: kill.time for kill in reversed(kills) if kill.time > before}
        # Events last: events have the numbers printed at the time, the summary has another rank's
        # view of the same failure.
        either = {**entry, **(event or {}), **resumed.get(which, {}), **rebuilt.get(which, {})}
        noticed_at = None
        if event is not None:
            noticed_at = event["time"] - event["recovery_seconds"]
        elif not any(rank in killed_at for rank in ranks):
            noticed_at = next((time for step, time in finished if step == either["step"]), None)
        failure = FailureRecord(
            ranks=ranks,
            step=either["step"],
            phase=either["phase"],
            killed_at=min((killed_at[rank] for rank in ranks if rank in killed_at), default=None),
            noticed_at=noticed_at,
            recovery_seconds=either["recovery_seconds"],
            stall_seconds=either.get("stall_seconds"),
            redone_steps=either["redone_steps"],
            shards=tuple(int(shard) for shard in either["shards"]),
            rebuild_seconds=either.get("rebuild_seconds"),
            whole_at=None,
            lost_bytes=either.get("rebuilt_bytes"),
            on_demand_rows=either.get("on_demand_rows"),
        )
        failures.append(_with_end(failure, rebuilt.get(which)))
    return tuple(sorted(failures, key=lambda failure: (failure.began_at or 0.0, failure.step)))


_Which = tuple[tuple[int, ...], int]
"""The ranks of a failure, and its number among failures of these ranks, from 1 on."""


def _numbered(failures: Iterable[dict[str, Any]]) -> dict[_Which, dict[str, Any]]:
    """Failures by ranks and number, in the order of time."""
    found: dict[_Which, dict[str, Any]] = {}
    count: Counter[tuple[int, ...]] = Counter()
    for failure in failures:
        ranks = tuple(failure["ranks"])
        count[ranks] += 1
        found[ranks, count[ranks]] = failure
    return found


def _failure_before(event: Event, written: Mapping[_Which, Event]) -> _Which:
    """The last failure of an event's ranks before the event; the first without any."""
    ranks = tuple(event["ranks"])
    return ranks, max(
        (
            number
            for (of, number), failure in written.items()
            if of == ranks and failure["time"] <= event["time"]
        ),
        default=1,
    )


def _with_end(failure: FailureRecord, rebuilt: Event | None) -> FailureRecord:
    """Fill in when the run was whole again.

    A failure without lost rows is over with its recovery.
    """
    noticed_at = failure.noticed_at if failure.noticed_at is not None else failure.killed_at
    if not failure.shards:
        whole_at = None if noticed_at is None else noticed_at + failure.recovery_seconds
        return replace(
            failure, rebuild_seconds=0.0, lost_bytes=0, on_demand_rows=0, whole_at=whole_at
        )
    if rebuilt is not None:
        return replace(failure, whole_at=rebuilt["time"])
    if failure.rebuild_seconds is not None and noticed_at is not None:
        return replace(failure, whole_at=noticed_at + failure.rebuild_seconds)
    return failure

"""The state of a run, as told by its events. Pure: events in, numbers out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from ecrm.run.reading import Event

LOOK_BACK = 10
"""Number of progress events to reckon the time left from."""


@dataclass
class RunStatus:
    """Numbers to show of a run of `steps` steps; `take` brings the numbers up to date.

    `failures` counts the failures survived since the last start. The steps of a script are not
    known at first: 0 until the run has started. With an `open_end` the data may end before.
    `samples_per_second` is known if the number of samples of a step is.
    `logged` are the values logged by the training. `rebuilding` are the shards not whole yet,
    `rebuilt` the share of rows recovered in the shards.
    """

    steps: int
    started: bool = False
    script: bool = False
    open_end: bool = False
    step: int = 0
    samples_per_second: float | None = None
    steps_per_second: float | None = None
    logged: dict[str, float | None] = field(default_factory=dict)
    failures: int = 0
    failures_left: int | None = None
    rebuilding: set[int] = field(default_factory=set)
    rebuilt: float = 1.0
    _seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=LOOK_BACK + 1))

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            self.failures_left = event.get("failures_left", self.failures_left)
            handle = getattr(self, f"_{event['event']}", None)
            if handle is not None:
                handle(event)

    def close(self) -> None:
        """End: no more events come."""

    @property
    def finishing(self) -> bool:
        """Whether the last step is done; evaluation and checks follow."""
        return self.started and self.step >= self.steps

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the last step is done, at the pace of the last progress events.

        `now` is in seconds since the epoch, like the time of events. Returns `None` before two
        events.
        """
        if len(self._seen) < 2:
            return None
        (began, first), (last, step) = self._seen[0], self._seen[-1]
        pace = (last - began) / (step - first)
        return max(last + pace * (self.steps - step) - now, 0.0)

    def _start(self, event: Event) -> None:
        self.started, self.script = True, "script" in event
        self.open_end = event.get("open_end", False)
        if self.script or not self.steps:  # a script may train several models, one by one
            self.steps = event["config"]["train"]["steps"]
        self.rebuilding.clear()
        self.failures, self.rebuilt, self.logged = 0, 1.0, {}
        self._goes_on_from(event.get("resumed", {}).get("step", 0), event["time"])

    def _progress(self, event: Event) -> None:
        if event["step"] <= self.step:
            return
        self.step = event["step"]
        self._seen.append((event["time"], self.step))
        self.samples_per_second = event.get("samples_per_second")
        self.steps_per_second = event.get("steps_per_second")
        self.logged = event.get("logged", {})
        self.rebuilt = event["rebuilt"]

    def _ended_early(self, event: Event) -> None:
        self.steps = event["step"]

    def _failure(self, event: Event) -> None:
        self.failures += 1
        lost = {int(shard) for shard in (*event["shards"], *event["moved"])}
        self.rebuilding |= lost
        if lost:
            self.rebuilt = 0.0

    def _rebuilt(self, event: Event) -> None:
        self._whole(set(event["shards"]))

    def _restored(self, event: Event) -> None:
        self._whole({account["shard"] for account in event["shards"]})

    def _reshaped(self, event: Event) -> None:
        self._whole(self.rebuilding)

    def _rolled_back(self, event: Event) -> None:
        self._whole(self.rebuilding)
        self._goes_on_from(event["step"], event["time"])

    def _whole(self, shards: Set[int]) -> None:
        self.rebuilding = self.rebuilding - shards
        if not self.rebuilding:
            self.rebuilt = 1.0

    def _goes_on_from(self, step: int, now: float) -> None:
        self.step = step
        self._seen.clear()
        self._seen.append((now, step))

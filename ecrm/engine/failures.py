"""The record of failures survived by a rank, with times for the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ecrm.base.errors import LostTouch


@dataclass
class RecoveryRecord:
    """A recovery after deaths: the dead, step and phase of noticing, and the cost.

    Dead ranks, step and phase are the same on all ranks. `stall_seconds` is the time from the last
    step finished before the failure to the first step finished afterwards; `rebuild_seconds` from
    noticing until the lost shards are whole (0 without lost shards). `None` until known.
    `redone_steps` counts steps with updates undone; the last step perhaps was only begun.
    """

    ranks: tuple[int, ...]
    step: int
    phase: str
    redone_steps: int
    noticed_at: float
    recovery_seconds: float
    shards: tuple[int, ...]
    slots: tuple[int, ...]
    rebuilt_bytes: int
    on_demand_rows: int = 0
    stall_seconds: float | None = None
    rebuild_seconds: float | None = None

    def __post_init__(self) -> None:
        if not self.shards:
            self.rebuild_seconds = 0.0

    def to_dict(self) -> dict[str, object]:
        return {
            "ranks": list(self.ranks),
            "step": self.step,
            "phase": self.phase,
            "stall_seconds": self.stall_seconds,
            "recovery_seconds": self.recovery_seconds,
            "redone_steps": self.redone_steps,
            "rebuild_seconds": self.rebuild_seconds,
            "rebuilt_bytes": self.rebuilt_bytes,
            "on_demand_rows": self.on_demand_rows,
            "shards": list(self.shards),
            "slots": list(self.slots),
        }


MOST_FUTILE = 3
"""Recoveries in a row without a death or a newly committed step: the next recovery ends the run."""


@dataclass
class FailureLog:
    """All failures so far, oldest first.

    `restored`: losses in restored shards (`Protection.accounts`).

    `interruptions` counts recoveries without a death, `futile` the interruptions since a step was
    last committed for the first time or a rank died. All ranks count the same, except `futile` on
    a rank after a missed commit.
    """

    failures: list[RecoveryRecord] = field(default_factory=list)
    restored: list[dict[str, Any]] = field(default_factory=list)
    interruptions: int = 0
    futile: int = 0
    _furthest: int = 0

    def shrunk(self, changed: bool) -> None:
        """Count a shrink; `changed`: whether the live ranks are others than before."""
        self.interruptions += not changed
        self.futile = 0 if changed else self.futile + 1

    def told(self) -> dict[str, Any]:
        """The log in JSON, for a rank that joins."""
        return asdict(self)

    @staticmethod
    def of(told: Mapping[str, Any]) -> FailureLog:
        """The log told by another rank. Times are by the clock of the other rank."""
        log = FailureLog(**told)
        log.failures = [
            RecoveryRecord(
                **{**record, **{k: tuple(record[k]) for k in ("ranks", "shards", "slots")}}
            )
            for record in told["failures"]
        ]
        return log

    def committed(self, step: int) -> None:
        """Note a commit of all steps before `step`; only a step never committed before counts."""
        if step > self._furthest:
            self._furthest, self.futile = step, 0

    @staticmethod
    def check(futile: int, why: str, most: int = MOST_FUTILE) -> None:
        """Raise LostTouch after more than `most` recoveries `futile`; `why` is the last reason."""
        if futile > most:
            raise LostTouch(
                f"calls between ranks failed {futile} times in a row, no rank died, "
                "and no step was finished in between; the last time: "
                f"{why or 'the reason is not known here'}"
            )

    def step_finished(self, last_finished_at: float, now: float) -> list[RecoveryRecord]:
        """Close the stall of failures without a later finished step; return the failures."""
        waiting = [failure for failure in self.failures if failure.stall_seconds is None]
        for failure in waiting:
            failure.stall_seconds = now - last_finished_at
        return waiting

    def shards_whole(
        self, whole: list[int], rebuilding: tuple[int, ...], on_demand: dict[int, int], now: float
    ) -> list[RecoveryRecord]:
        """Close the rebuild of failures with all lost shards whole again; return the failures."""
        waiting = [
            failure
            for failure in self.failures
            if failure.rebuild_seconds is None
            and set(failure.shards) & set(whole)
            and not set(failure.shards) & set(rebuilding)
        ]
        for failure in waiting:
            failure.rebuild_seconds = now - failure.noticed_at
            failure.on_demand_rows = sum(on_demand.get(shard, 0) for shard in failure.shards)
        return waiting

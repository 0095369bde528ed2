"""The values reported by evaluations of a script, the best value, and the consequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ecrm.base.errors import UsageError
from ecrm.engine.engine import Engine
from ecrm.engine.events import EndedEarly
from ecrm.model.module_replica import ModuleReplica

EVALUATED = "eval_"
"""The beginning of names of reported values in summary.json."""
MODES = ("max", "min")
"""Whether the highest or the lowest value is the best."""


@dataclass(frozen=True)
class Goal:
    """The comparison of values reported by a function for `session.every`, and its effects.

    - `mode`: "max" if the highest value is the best, "min" if the lowest is.
    - `keep_best`: whether the model of the best value is kept, as `checkpoints/best`.
    - `patience`: training ends after `patience` values in a row without a better value; 0 for
      never.
    """

    mode: str
    keep_best: bool
    patience: int

    def beats(self, value: float, other: float) -> bool:
        """Whether `value` is better than `other`; any value beats NaN."""
        return math.isnan(other) or (value > other if self.mode == "max" else value < other)


def goal_of(mode: str | None, keep_best: bool, patience: int) -> Goal | None:
    """The goal for arguments of `session.every`. Raises UsageError for unfit arguments."""
    if mode is None:
        if keep_best or patience:
            given = f"patience={patience}" if patience else "keep_best=True"
            raise UsageError(
                f"session.every({given}) compares values, and has no mode",
                otherwise='give mode="max" where the highest value is the best, or mode="min"',
            )
        return None
    if mode not in MODES:
        raise UsageError(f'session.every(mode={mode!r}): give "max" or "min"')
    return Goal(mode, bool(keep_best), patience)


@dataclass(frozen=True)
class Reported:
    """The values reported so far, part of the state of a dense replica.

    - `at`: by number of a function, the step of the function's last reported value.
    - `best`, `step`: the best value and its step; NaN and -1 before the first value.
    - `to_beat`: the best value on the schedule of `session.every`; NaN before the first. A run
      that ends off the schedule reports once more. A resumed run then ends at the step at which an
      undisturbed run ends.
    - `without_gain`: the number of values on the schedule since `to_beat`. `patience`: the patience
      of the goal.
    - `of`: the values compared, as "mode step", the step at which the data began. A run that goes
      on with other data, or with another mode, begins a new comparison.
    - `named`: the named values reported last.
    """

    at: Mapping[int, int] = field(default_factory=dict)
    best: float = math.nan
    step: int = -1
    to_beat: float = math.nan
    without_gain: int = 0
    patience: int = 0
    of: str = ""
    named: Mapping[str, float | None] = field(default_factory=dict)

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Reported:
        """The values of a replica's `reports`; JSON may have turned the keys into strings."""
        fields = {name: value for name, value in state.items() if name != "at"}
        fields.setdefault("to_beat", fields.get("best", math.nan))  # a state of an older version
        return Reported({int(n): step for n, step in state.get("at", {}).items()}, **fields)

    def state(self) -> dict[str, Any]:
        """The values for a replica's `reports`, the inverse of `from_state`."""
        return {**vars(self), "at": {str(number): step for number, step in self.at.items()}}

    def after(
        self,
        value: float,
        step: int,
        number: int,
        goal: Goal | None,
        data_began: int = 0,
        *,
        on_schedule: bool = True,
    ) -> Reported:
        """The values after a further value of function `number`; NaN is no value.

        A second value for the same step, as from a run resumed at the step, changes nothing. A
        value off the schedule may be the best, and does not count for the patience.
        """
        of = self.of if goal is None else f"{goal.mode} {data_began}"
        anew = of != self.of
        if math.isnan(value) or (self.at.get(number) == step and not anew):
            return self
        now = replace(self, at={**self.at, number: step}, of=of)
        if goal is None:
            return now
        now = replace(now, patience=goal.patience)
        if anew:
            now = replace(now, best=math.nan, to_beat=math.nan, without_gain=0)
        if goal.beats(value, now.best):
            now = replace(now, best=value, step=step)
        if not on_schedule:
            return now
        if goal.beats(value, now.to_beat):
            return replace(now, to_beat=value, without_gain=0)
        return replace(now, without_gain=now.without_gain + 1)

    @property
    def out_of_patience(self) -> bool:
        """Whether training ends for lack of a better value."""
        return 0 < self.patience <= self.without_gain

    def in_words(self) -> str:
        """The reason for the end of training."""
        return (
            f"none of the last {self.without_gain} values reported was better than "
            f"{self.best:g} at step {self.step}"
        )


@dataclass(frozen=True)
class Findings:
    """One rank's findings from a function for `session.every`, for all ranks.

    - `stops`: whether the function has called `session.stop`.
    - `value`: the value reported by the function, NaN without a report.
    - `named`: the named values reported by the function.
    - `reports`: the `reports` of the rank's dense replica, `None` without a replica.
    """

    stops: bool
    value: float
    named: Mapping[str, float | None]
    reports: Mapping[str, Any] | None


def ended_early(engine: Engine, steps: int) -> EndedEarly | None:
    """The step and reason of an early end asked for by the script; `None` otherwise.

    Known to dense holders.
    """
    dense = engine.state.dense
    if dense is None or not 0 <= dense.ends_at <= engine.step < steps:
        return None
    reported = Reported.from_state(dense.reports if isinstance(dense, ModuleReplica) else {})
    why, best = "session.stop() was called", None
    if reported.out_of_patience:
        why, best = reported.in_words(), reported.step
    return EndedEarly(step=engine.step, steps_wanted=steps, best_step=best, why=why)


def last_named(engine: Engine) -> dict[str, float | None]:
    """The named values reported last, by name. Known to dense holders; empty elsewhere."""
    dense = engine.state.dense
    reports = dense.reports if isinstance(dense, ModuleReplica) else {}
    return dict(Reported.from_state(reports).named)

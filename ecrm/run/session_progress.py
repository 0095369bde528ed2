"""Progress of a session: the pace, and the means of the values logged by the script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ecrm.engine.engine import Engine
from ecrm.model.module_replica import ModuleReplica
from ecrm.run.progress import Measured, StepProgress, Tell, window_start


class SessionProgress(StepProgress):
    """The progress report of a session, every few steps.

    Every dense holder gets the values `logged` in committed steps, so that any reporter has the
    values. `open_end`: whether the data may end before the last step.
    """

    def __init__(self, steps: int, every: int, tell: Tell, open_end: bool = False) -> None:
        super().__init__(steps, every, tell)
        self._of = f"{' of at most ' if open_end else '/'}{steps}"
        self._logged: dict[int, list[Mapping[str, float]]] = {}

    def logged(self, step: int, by_slot: Mapping[int, Mapping[str, float]]) -> None:
        """Keep the values logged by slots in a step, for the next progress step."""
        self._logged[step] = list(by_slot.values())
        start = window_start(step + 1, self._every)
        self._logged = {at: values for at, values in self._logged.items() if at >= start}

    def counted(self, step: int, steps_per_second: float) -> dict[str, Any]:
        return {"steps_per_second": steps_per_second}

    def measured(self, engine: Engine, first: int) -> Measured:
        known = {step: all_ for step, all_ in self._logged.items() if first <= step < engine.step}
        fields = {
            "skipped": steps_skipped(engine),
            "logged": _means([one for all_ in known.values() for one in all_]),
        }
        return lambda: {**fields, "window": len(known)}

    def in_words(self, fields: dict[str, Any], window: int) -> str:
        logged = "".join(f"{name} {value:.4f}  " for name, value in fields["logged"].items())
        known = f"(of {fields['window']} of {window} steps)  " if logged else ""
        skipped = f"skipped {fields['skipped']}  " if fields["skipped"] else ""
        return (
            f"step {fields['step']:>{len(str(self._steps))}}{self._of}  "
            f"{fields['steps_per_second']:>7,.1f} steps/s  "
            f"{logged}{known if fields['window'] < window else ''}"
            f"{skipped}committed {fields['committed']}  "
            f"failures left {fields['failures_left']}  rebuilt {fields['rebuilt']:.0%}"
        )


def steps_skipped(engine: Engine) -> int:
    """The number of steps skipped before the engine's step, on a dense holder; 0 elsewhere."""
    dense = engine.state.dense
    return dense.skipped if isinstance(dense, ModuleReplica) else 0


def _means(logged: list[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each value by name, over all slots with the value."""
    names = sorted({name for values in logged for name in values})
    return {
        name: sum(values) / len(values)
        for name in names
        for values in ([one[name] for one in logged if name in one],)
    }

"""Progress of a session: the pace, and the means of the values logged by the script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ecrm.engine.engine import Engine
from ecrm.model.module_replica import ModuleReplica
from ecrm.run.log_delivery import read_note
from ecrm.run.progress import Measured, StepProgress


class SessionProgress(StepProgress):
    """The progress report of a session, every few steps.

    Every dense holder has the notes of slots on each step (`ecrm/engine/step_log.py`). So the
    logged values depend only on the finished steps, not on the reporter or on deaths.
    """

    def measured(self, engine: Engine, first: int) -> Callable[[], Measured]:
        step, skipped = engine.step, steps_skipped(engine)

        def measure() -> Measured:
            log = engine.state.log  # a new dense holder gets a new log
            known = [notes for at in range(first, step) if (notes := log.of(at))]
            logged = [read_note(note) for notes in known for note in notes.values()]
            return Measured(skipped, _means(logged), len(known))

        return measure


def samples_of(samples: int, step: int, steps_per_second: float) -> dict[str, Any]:
    """The number of samples after `step` steps and the pace; empty if `samples`, a step's, is 0."""
    if not samples:
        return {}
    return {"samples": step * samples, "samples_per_second": steps_per_second * samples}


def steps_skipped(engine: Engine) -> int:
    """The number of steps skipped before the engine's step, on a dense holder; 0 elsewhere."""
    dense = engine.state.dense
    return dense.skipped if isinstance(dense, ModuleReplica) else 0


def _means(logged: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each value by name, over all slots with the value."""
    names = sorted({name for values in logged for name in values})
    return {
        name: sum(values) / len(values)
        for name in names
        for values in ([one[name] for one in logged if name in one],)
    }

"""Progress of a session: the pace, and the means of the values logged by the script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ecrm.engine.engine import Engine
from ecrm.model.module_replica import ModuleReplica
from ecrm.run.log_delivery import read_note
from ecrm.run.progress import Measured, StepProgress, Tell


class SessionProgress(StepProgress):
    """The progress report of a session, every few steps.

    Every dense holder has the notes of slots on each step (`ecrm/engine/step_log.py`). So the
    logged values depend only on the finished steps, not on the reporter or on deaths. `open_end`:
    whether the data may end before the last step. `samples`: the number of samples in a step, 0 if
    unknown.
    """

    def __init__(
        self, steps: int, every: int, tell: Tell, open_end: bool = False, samples: int = 0
    ) -> None:
        super().__init__(steps, every, tell)
        self._samples = samples
        self._of = f"{' of at most ' if open_end else '/'}{steps}"

    def counted(self, step: int, steps_per_second: float) -> dict[str, Any]:
        return {
            "steps_per_second": steps_per_second,
            **samples_of(self._samples, step, steps_per_second),
        }

    def measured(self, engine: Engine, first: int) -> Measured:
        step, skipped = engine.step, steps_skipped(engine)

        def measure() -> dict[str, Any]:
            log = engine.state.log  # a new dense holder gets a new log
            known = [notes for at in range(first, step) if (notes := log.of(at))]
            logged = [read_note(note) for notes in known for note in notes.values()]
            return {"skipped": skipped, "logged": _means(logged), "window": len(known)}

        return measure

    def in_words(self, fields: dict[str, Any], window: int) -> str:
        logged = "".join(f"{name} {value:.4f}  " for name, value in fields["logged"].items())
        known = f"(of {fields['window']} of {window} steps)  " if logged else ""
        rate = fields.get("samples_per_second")
        pace = "" if rate is None else f"{rate:>9,.0f} samples/s  "
        skipped = f"skipped {fields['skipped']}  " if fields["skipped"] else ""
        return (
            f"step {fields['step']:>{len(str(self._steps))}}{self._of}  "
            f"{fields['steps_per_second']:>7,.1f} steps/s  {pace}"
            f"{logged}{known if fields['window'] < window else ''}"
            f"{skipped}committed {fields['committed']}  "
            f"failures left {fields['failures_left']}  rebuilt {fields['rebuilt']:.0%}"
        )


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

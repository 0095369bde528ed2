"""Values that a script reports: the best model is kept, and training ends without gain."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated.test_session_stop import layout, plateau, trained

from ecrm.checkpoint.folder import Checkpoint, CheckpointFolder, find
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.checkpoint.restore import Restorer
from ecrm.model.nested_state import leaves, read
from ecrm.session.session import Session
from ecrm.session.step_loop import ended_early
from ecrm.testing.simulated_transport import PhaseFault, ProgramFailed
from support.sessions import Layout, Left, run

VALUES = {2: 0.5, 4: 0.8, 5: 0.6, 6: 0.7, 7: 0.9, 8: 0.8, 10: 0.9}
"""By step: the best of the even steps up to eight comes at step 4, and again at step 8."""
DEATHS = {
    "none": (),
    "main as the best is found": (PhaseFault(3, 4, "evaluate"),),
    "main as the best is written": (PhaseFault(3, 4, "checkpoint"),),
    "trainer as the best is written": (PhaseFault(4, 4, "checkpoint"),),
    "server after the best": (PhaseFault(1, 5, "update"),),
    "main without gain": (PhaseFault(3, 8, "evaluate"), PhaseFault(0, 3, "parity")),
}


def reports(sign: float = 1.0, steps: int = 2, **goal: Any) -> Callable[[Session], None]:
    """Have a session report VALUES, times `sign`."""

    def prepare(session: Session) -> None:
        @session.every(steps, **goal)
        def look() -> None:
            if session.is_main:
                session.report(sign * VALUES[session.step])

    return prepare


def with_checkpoints(at: Layout, folder: Path, resumes: bool = False, steps: int = 12) -> Layout:
    kept = CheckpointFolder(folder)
    policy = CheckpointPolicy(steps=steps, at_end=True, keep=1)
    return replace(
        at,
        resumes=resumes,
        durable=lambda: Restorer(kept, find(folder)[0] if resumes else ()),
        checkpoints=lambda engine: Checkpoints(engine, kept, {}, policy),
    )


def contents(checkpoint: Path) -> tuple[list[bytes], bytes, str]:
    """The rows of a checkpoint by file, parameters and buffers, and all other dense state."""
    rows = sorted(path.read_bytes() for path in checkpoint.glob("rows-*"))
    dense = torch.frombuffer(bytearray((checkpoint / "dense.bin").read_bytes()), dtype=torch.uint8)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    module, rest = (part["shape"][0] for part in manifest["dense"][:2])
    assert rows
    state = read(dense[module : module + rest])
    return rows, bytes(dense[:module].tolist()), str(sorted(map(str, leaves(state))))


@pytest.mark.parametrize("interval", [3, pytest.param(1, marks=pytest.mark.drill)])
@pytest.mark.parametrize("deaths", DEATHS)
def test_the_best_model_is_kept_and_training_ends_without_gain(deaths, interval, tmp_path):
    def left(faults: Sequence[PhaseFault], folder: Path) -> tuple[Left, int, Any]:
        ended: list[Any] = []

        def train(start: Any) -> Session:
            begin = trained(prepare=reports(mode="max", keep_best=True, patience=2), steps=12)
            session = begin(start)
            ended.append(ended_early(session._engine, 12))
            return session

        found = run(faults, with_checkpoints(layout(interval), folder), train)
        best = Checkpoint.open((folder / "best").resolve())
        (why,) = {str(each) for each in ended if each is not None}
        return found, best.step, why

    calm, calm_best, why = left((), tmp_path / "calm")
    assert calm_best == 4
    assert "(step=8, " in why and "best_step=4" in why
    assert "none of the last 2 values reported was better than 0.8 at step 4" in why
    found, best, said = left(DEATHS[deaths], tmp_path / "killed")
    assert (found.tables, found.dense, best, said) == (calm.tables, calm.dense, 4, why)
    assert contents(tmp_path / "killed" / "best") == contents(tmp_path / "calm" / "best")


@pytest.mark.parametrize(("end", "best"), [(5, 4), (6, 4), (7, 7)])
def test_a_resumed_run_ends_early_at_the_step_of_the_undisturbed_run(end, best, tmp_path):
    """The first part also reports after step 5 or 7, as no undisturbed run does.

    Such a value steps no scheduler either. The part of 6 steps is a control.
    """
    prepare = reports(mode="max", keep_best=True, patience=2, at_end=True)

    def left(folder: Path, steps: int, resumes: bool = False) -> tuple[Left, int]:
        at = with_checkpoints(layout(), folder, resumes, steps)
        ended: list[int] = []

        def train(start: Any) -> Session:
            session = trained(prepare=prepare, steps=steps, scheduler=plateau)(start)
            ended.append(session._engine.step)
            return session

        found = run((), at, train)
        return found, max(ended)

    calm, calm_end = left(tmp_path / "calm", 12)
    left(tmp_path / "parts", end)
    again, again_end = left(tmp_path / "parts", 12, resumes=True)
    assert calm_end == again_end == 8
    assert (again.tables, again.dense) == (calm.tables, calm.dense)
    assert Checkpoint.open((tmp_path / "parts" / "best").resolve()).step == best


def test_the_lowest_value_is_the_best_with_mode_min(tmp_path):
    prepare = reports(sign=-1.0, mode="min", keep_best=True)
    run((), with_checkpoints(layout(), tmp_path, steps=10), trained(prepare=prepare, steps=10))
    assert Checkpoint.open((tmp_path / "best").resolve()).step == 10


def test_a_resume_at_the_step_of_a_report_does_not_report_twice(tmp_path):
    """The checkpoint at the end has the report already, and the function is called again."""

    def left(at: Layout, steps: int) -> Left:
        return run((), at, trained(prepare=reports(mode="max"), steps=steps, scheduler=plateau))

    calm = left(layout(), 10)
    left(with_checkpoints(layout(), tmp_path, steps=8), 8)
    again = left(with_checkpoints(layout(), tmp_path, resumes=True, steps=10), 10)
    assert (again.tables, again.dense) == (calm.tables, calm.dense)


@pytest.mark.parametrize(
    ("goal", "said"),
    [
        ({"patience": 3}, "compares values, and has no mode"),
        ({"keep_best": True}, "compares values, and has no mode"),
        ({"mode": "highest"}, 'give "max" or "min"'),
        ({"mode": "max", "patience": -1}, "at least 0 is needed"),
        ({"mode": "max", "patience": "3"}, "give a whole number"),
        ({"steps": 0, "at_end": True, "mode": "max", "patience": 3}, "never ends training"),
    ],
)
def test_a_goal_that_cannot_be_is_refused(goal, said):
    with pytest.raises(ProgramFailed, match=said):
        run((), layout(), trained(prepare=reports(**goal)))


def test_two_functions_with_a_mode_are_refused():
    def prepare(session: Session) -> None:
        reports(mode="max")(session)
        reports(mode="max")(session)

    with pytest.raises(ProgramFailed, match="has a mode twice"):
        run((), layout(), trained(prepare=prepare))

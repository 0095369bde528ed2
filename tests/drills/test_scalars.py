"""TensorBoard scalars of a real run whose reporter died."""

from __future__ import annotations

import pytest

from support.drilling import BASE, launch
from support.scalars import read


def test_scalars_of_a_run_whose_reporter_died_are_its_events(tmp_path, criteo_rows, undisturbed):
    sets = {**BASE, "train.tensorboard": True, "protection.verify_parity_at_end": True}
    run = launch(tmp_path / "run", criteo_rows, sets, ("0@12:parity",))
    assert run.code == 0 and run.model == undisturbed, run.output
    assert "\x1b" not in run.output
    found = read(run.folder)
    events = run.events_of("progress")
    assert [step for step, _ in found["train/loss"]] == list(range(5, 41, 5))
    assert [value for _, value in found["train/loss"]] == pytest.approx(
        [event["logged"]["loss"] for event in events]
    )
    assert found["evaluation/auc"] == [(40, pytest.approx(run.summary["eval_auc"]))]

"""Progress: what is kept between events is bounded, also without progress lines."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from ecrm.engine.step_log import StepLog
from ecrm.run import progress as module
from ecrm.run.progress import window_start
from ecrm.run.run_folder import RunFolder
from ecrm.run.session_progress import SessionProgress


def train(folder, steps: int, every: int, losses=lambda step: 0.5) -> list[dict]:
    """Finish steps one after the other; the events written."""
    engine = SimpleNamespace(
        rank=0,
        view=SimpleNamespace(reporter=0),
        step=0,
        committed=0,
        state=SimpleNamespace(
            log=StepLog(), commits=0, failures_left=1, rebuild_fraction=1.0, dense=None
        ),
    )

    def tell(step, make):
        progress, in_words = make()
        assert progress.step == step
        RunFolder(folder).event(progress)
        if in_words:
            print(in_words)
        return True

    progress = SessionProgress(steps, every, tell, samples=64)
    for step in range(1, steps + 1):
        note = bytearray(json.dumps({"loss": losses(step)}).encode())
        engine.state.log.add(step - 1, {0: torch.frombuffer(note, dtype=torch.uint8)})
        engine.step = engine.committed = engine.state.commits = step
        progress.step_finished(engine)
        assert len(progress._finished_at) < module.MOST_FINISHED
        assert len(engine.state.log.export(step)[0]) <= module.MOST_FINISHED + module.KEPT_COMMITS
    return [
        json.loads(line, parse_constant=lambda word: word)
        for line in (folder / "events.jsonl").read_text().splitlines()
    ]


def test_without_progress_lines_events_still_come(tmp_path, capsys):
    events = train(tmp_path, 2500, every=0)
    assert [(event["step"], event["window"]) for event in events] == [
        (1000, 1000),
        (2000, 1000),
        (2500, 500),
    ]
    assert [step for event in events for step, _ in event["finished"]] == list(range(1, 2501))
    assert all(event["logged"] == {"loss": 0.5} and event["samples_per_second"] for event in events)
    assert capsys.readouterr().out.count("\n") == 1


def test_a_loss_that_is_not_finite_spoils_its_own_window_only(tmp_path):
    events = train(
        tmp_path, 30, every=10, losses=lambda step: float("inf") if 17 <= step < 20 else 0.5
    )
    assert [event["logged"]["loss"] for event in events] == [0.5, None, 0.5]


@pytest.mark.parametrize(
    "every, due",
    [
        (0, (1000, 2000, 3000)),
        (300, range(300, 3001, 300)),
        (1500, (1000, 1500, 2500, 3000)),
        (1, range(1, 3001)),
    ],
)
def test_progress_steps_are_a_function_of_the_step(every, due):
    starts = [window_start(step, every) for step in range(1, 3001)]
    assert sorted(set(starts)) == [0, *list(due)[:-1]]
    assert all(
        start < step <= start + module.MOST_FINISHED for step, start in enumerate(starts, start=1)
    )
    assert [step for step in range(1, 3001) if window_start(step + 1, every) == step] == list(due)

"""Progress: what is kept between events is bounded, also without progress lines."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch

from ecrm.train import progress as module
from ecrm.train.progress import Progress
from ecrm.train.run_folder import RunFolder


def train(folder, steps: int, every: int) -> list[dict]:
    """Finish steps one after the other; the events written."""
    dense = SimpleNamespace(loss_sum=torch.zeros(1, dtype=torch.float64))
    engine = SimpleNamespace(
        rank=0, view=SimpleNamespace(reporter=0), dense=dense, step=0, committed=0, failures_left=1, rebuild_fraction=1.0
    )

    def tell(fields, in_words):
        RunFolder(folder).event({"event": "progress", **fields})
        if in_words:
            print(in_words)

    progress = Progress(steps, 64, every, tell)
    for step in range(1, steps + 1):
        engine.step = engine.committed = step
        dense.loss_sum += 0.5
        progress.scored(torch.tensor([0.0, 1.0]), torch.tensor([0.25, 0.75]))
        progress.step_finished(engine)
        assert len(progress._finished_at) < module.MOST_FINISHED
    return [json.loads(line, parse_constant=lambda word: word) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_without_progress_lines_events_still_come(tmp_path, capsys):
    events = train(tmp_path, 2500, every=0)
    assert [event["step"] for event in events] == [1000, 2000, 2500]
    assert [step for event in events for step, _ in event["finished"]] == list(range(1, 2501))
    assert all(event["loss"] == 0.5 and event["auc"] == 1.0 for event in events)
    assert capsys.readouterr().out.count("\n") == 1

"""`--resume auto`: one line, killed at every instant, ends in the undisturbed model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.drilling import BASE, Run, launch
from support.lives import half_written, life, one_line


def there(pattern: str) -> Callable[[Path], Callable[[float], bool]]:
    """Over as soon as there is such a file."""
    return lambda folder: lambda seconds: any(True for _ in folder.glob(pattern))


def after(seconds: float) -> Callable[[Path], Callable[[float], bool]]:
    return lambda folder: lambda gone: gone >= seconds


KILLS = [
    after(0.1),
    after(0.5),
    after(1.2),
    there("lock"),
    after(1.7),
    there("ranks.json"),
    there("events.jsonl"),
    after(2.3),
    there("checkpoints/.epoch-*/*/.step-*"),
    after(2.7),
    there("checkpoints/.epoch-*/*/.step-*/dense.bin*"),
    after(3.1),
    there("checkpoints/.epoch-*/*/.step-*/manifest.json"),
    after(3.6),
    after(4.2),
    there("checkpoints/step-00001000"),
    there(".summary.json*"),
]
"""When everything is killed: in seconds from typing the line, or as soon as a file is there."""


@pytest.mark.parametrize(
    "sets",
    [
        {"checkpoint.every_steps": 20},
        {
            "checkpoint.every_steps": 10,
            "checkpoint.mode": "async",
            "checkpoint.kind": "incremental",
            "checkpoint.full_every": 3,
        },
        {},
        {"protection.name": "mapped", "protection.verify_parity_at_end": False},
    ],
    ids=["sync", "async", "end", "mapped"],
)
def test_one_line_killed_at_every_instant_ends_in_the_undisturbed_model(
    tmp_path, criteo_rows, sets
):
    long = {**BASE, "train.steps": 1000}
    folder, expected = tmp_path / "run", launch(tmp_path / "undisturbed", criteo_rows, long).model
    words, killed = one_line(folder, criteo_rows, {**long, **sets}), 0
    for kill in KILLS:
        code, output = life(words, kill(folder))
        assert code in (None, 0), output
        if code == 0:
            break
        killed += 1
    code, output = life(words)
    assert code == 0, output
    run = Run(code, output, folder)
    print(f"{killed} kills, {len(run.summary['lives'])} lives: {run.summary['lives']}")
    assert killed >= 9 and run.model == expected and not half_written(folder)
    assert len(run.summary["lives"]) == len(run.events_of("start"))
    assert [json.loads(line)["time"] for line in (folder / "events.jsonl").read_text().splitlines()]

"""Real Criteo Terabyte rows, if present: prepared, trained, a rank killed, the same bits."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.drilling import drill
from support.paths import TERABYTE_HEAD


@pytest.mark.skipif(not TERABYTE_HEAD.exists(), reason=f"no real rows at {TERABYTE_HEAD}")
def test_real_terabyte_rows_train_through_a_kill(tmp_path):
    data = tmp_path / "data"
    words = [
        sys.executable,
        "-m",
        "ecrm",
        "prepare",
        "criteo",
        str(TERABYTE_HEAD),
        "--output",
        str(data),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    sets = {"train.steps": 60, "train.eval_every_steps": 25, "model.max_rows_per_table": 20_000}
    calm = drill(tmp_path / "calm", data, sets)
    killed = drill(
        tmp_path / "killed",
        data,
        {**sets, "model.dense_arch": "native"},
        ("1@30:parity", "3@40:backward"),
    )
    assert killed.model == calm.model
    assert killed.summary["eval_auc"] == calm.summary["eval_auc"]
    assert killed.summary["eval_logloss"] == calm.summary["eval_logloss"]
    assert calm.summary["eval_samples"] == 1000
    assert [event["step"] for event in calm.events_of("evaluation")] == [25, 50, 60]

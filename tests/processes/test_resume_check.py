"""The run of a changed script that cannot go on is refused before its ranks start."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from ecrm.base.errors import UsageError
from ecrm.config.script import Script
from ecrm.run import resume_check
from ecrm.run.auto_resume import AUTO_RESUME
from ecrm.run.resume_check import check_resume
from ecrm.run.session_run import merged_config, trained_by
from ecrm.run.spec import RunSpec
from ecrm.run.surveyed import run_to_training

SCRIPT = """
import os, sys, torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
import ecrm

print('{"kind": "UsageError", "why": "a line of the script"}')
if sys.argv[1] == "fails":
    raise ValueError("at the start")
table = EmbeddingBagConfig(num_embeddings=50, embedding_dim=4, name="t", feature_names=["item"])
model = EmbeddingBagCollection([table], device=torch.device("meta"))
apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
session = ecrm.Session(model, slots=2)
for batch in session.steps(lambda step, slot: None, int(sys.argv[1])):
    os.abort()
"""


@pytest.fixture
def begun(tmp_path: Path):
    """The spec of a run that has begun with 100 steps, by the steps that it is to go on with."""
    path, folder = tmp_path / "train.py", tmp_path / "run"
    path.write_text(SCRIPT)
    folder.mkdir()

    def spec(steps: str) -> RunSpec:
        script = Script(path, None, (steps,))
        return RunSpec(script, script.load_config(["cluster.trainers=2"]), folder, (), AUTO_RESUME)

    first = spec("100")

    def about(wanted):
        config = merged_config(first, wanted, first.config.world_size)
        return trained_by(wanted, config).about()

    start = {
        "time": 1.0,
        "event": "start",
        "script_sha256": first.script.digest,
        "run": run_to_training(first.script, about),
    }
    (folder / "events.jsonl").write_text(f"{json.dumps(start)}\n")
    return spec


def test_other_steps_are_refused_before_any_rank_starts(begun):
    with pytest.raises(UsageError, match="holds a run with steps 100, here steps is 200: name a"):
        check_resume(begun("200"))


def test_the_same_script_is_not_run(begun, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process starts"))
    check_resume(begun("100"))
    fresh = begun("200")
    assert fresh.run_dir is not None
    (fresh.run_dir / "events.jsonl").unlink()
    check_resume(fresh)


def test_what_else_goes_wrong_is_left_to_the_ranks(begun):
    check_resume(begun("fails"))


def test_a_script_that_takes_long_is_left_to_the_ranks(begun, monkeypatch):
    monkeypatch.setattr(resume_check, "SECONDS", 0.3)
    began = time.monotonic()
    check_resume(begun("200"))
    assert time.monotonic() - began < 10

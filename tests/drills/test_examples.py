"""Examples and the tutorial's two scripts: they learn, and kills change nothing of it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from support.drilling import Run
from support.examples import EXAMPLES, dead_ranks, run_example

KILLS = ("--kill", "1@12:parity", "--kill", "3@25:update")
"""A server, and the trainer that prints."""

LEARNT = {
    "two_tower.py": r"^AUC of held-out users: (0\.[6-9]\d+) \(0\.5 by guessing\)$",
    "multi_hot_dcn.py": r"^log loss of held-out customers: (0\.[0-5]\d+) \(0\.693 by guessing\)$",
}
"""What each example prints, if it has learnt something."""


def said(run: Run, script: str) -> list[str]:
    return re.findall(LEARNT[script], run.output, re.MULTILINE)


@pytest.mark.parametrize("script", LEARNT)
def test_an_example_learns_and_kills_leave_its_model(tmp_path, script):
    own = ("--steps", "50") if script == "two_tower.py" else ("--customers", "12800")
    runs = []
    for name, words in (("calm", ()), ("killed", KILLS)):
        (tmp_path / name).mkdir()
        runs.append(run_example(script, tmp_path / name, words, own))
        assert runs[-1].code == 0, runs[-1].output
    calm, killed = runs
    assert dead_ranks(calm) == [] and dead_ranks(killed) == [1, 3]
    assert calm.summary["steps"] == 50 and killed.model == calm.model
    assert calm.progress and killed.progress == calm.progress
    assert len(said(calm, script)) == 1, calm.output
    assert said(killed, script) == said(calm, script)
    models = [torch.load(run.folder.parent / "model.pt") for run in runs]
    assert models[0].keys() == models[1].keys() and len(models[0]) > 4
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_the_script_that_the_tutorial_begins_with_learns(tmp_path):
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    plain = EXAMPLES / "multi_hot_dcn_plain.py"
    done = subprocess.run(
        [*words, str(plain), "--customers", "12800"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(LEARNT["multi_hot_dcn.py"], done.stdout, re.MULTILINE)) == 1, done.stdout


def test_with_the_first_values_of_plain_torch_a_recipe_has_its_numbers(tmp_path, criteo_rows):
    """DLRMv2: all optimizers leave rows without gradients alone, so nothing else may differ."""

    def told(script: str, *more: str) -> list[str]:
        words = [sys.executable, EXAMPLES / script, criteo_rows, "--model", "mlperf", *more]
        words += ["--batch", "256", "--narrow", "8", "--held-out", "0.2", "--max-rows", "2000"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return re.findall(r"^(?:AUC|log loss): (0\.\d{5})", done.stdout, re.MULTILINE)

    plain = told("criteo_references_plain.py")
    assert len(plain) == 2
    assert told("criteo_references.py", "--tables", "cpu") == plain
    assert told("criteo_references.py") != plain

"""The finished model is kept in the run folder, unless the config says otherwise."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from ecrm.checkpoint.model_file import read_safetensors
from ecrm.cli.commands import main
from support.drilling import BASE, RUN_SECONDS, Run, launch_words, resume


def exported(run: Run, output: Path) -> dict:
    """What the run's last line says to type, typed."""
    ((line,),) = [re.findall(r"ecrm (export .*)$", run.output, re.MULTILINE)]
    words = line.replace("model.safetensors", str(output)).split()
    assert main(words) == 0
    return read_safetensors(output)


def test_a_run_without_a_word_on_checkpoints_leaves_its_model(
    tmp_path, criteo_rows, undisturbed_run
):
    assert (
        f"model of step 40 in {undisturbed_run.folder}/checkpoints/step-00000040; as one file: "
        f"ecrm export" in undisturbed_run.output
    )
    assert undisturbed_run.output.splitlines()[-1].startswith("model of step 40")
    assert (
        undisturbed_run.summary["checkpoint_step"] == 40
        and undisturbed_run.summary["checkpoint_failed"] is None
    )
    tensors = exported(undisturbed_run, tmp_path / "model")
    assert len(tensors) > 26 and all(value.size for value in tensors.values())
    longer = resume(
        tmp_path / "longer", criteo_rows, undisturbed_run.folder, {**BASE, "train.steps": 41}
    )
    assert longer.code == 0 and longer.summary["resumed"]["step"] == 40, longer.output


@pytest.mark.drill
def test_a_run_that_keeps_nothing_says_so_once_and_one_that_shall_not_is_content(
    tmp_path, criteo_rows
):
    sets = {
        "cluster.layout": "colocated",
        "cluster.servers": 1,
        "cluster.trainers": 1,
        "cluster.spares": 0,
        "protection.name": "none",
    }
    words = launch_words(
        tmp_path / "none",
        criteo_rows,
        {**sets, "model.dense_arch": "native", "protection.verify_parity_at_end": False},
    )
    words[words.index("launch")] = "train"  # one rank needs no mpirun
    quiet = subprocess.run(
        [*words, "--set", "checkpoint.at_end=false"],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert (
        quiet.returncode == 0
        and "model of step" not in quiet.stdout
        and not (tmp_path / "none" / "checkpoints").exists()
    )
    del words[words.index("--run-dir") : words.index("--run-dir") + 2]
    done = subprocess.run(words, capture_output=True, text=True, timeout=RUN_SECONDS, cwd=tmp_path)
    assert (
        done.returncode == 0
        and done.stdout.count("nothing of this run is kept: there was no --run-dir") == 1
    ), done.stderr
    assert os.listdir(tmp_path) == ["none"]

"""The finished model is kept: in the run folder, exportable, gone on from; where it is not, the end says so and the exit code is 7."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ecrm.checkpoint.export import read_safetensors
from ecrm.cli.commands import main
from ecrm.errors import NotKept
from ecrm.files import STOPPED, SUMMARY, check_summary
from support.drilling import BASE, RUN_SECONDS, Run, launch_words, resume
from support.paths import PROGRAMS

MISBEHAVING = str(PROGRAMS / "misbehaving.py")


def launch_as(how: str, folder: Path, data: Path, sets: dict, stop_after: str = "") -> Run:
    """A launch on whose ranks something is missing; asked to stop once `stop_after` is in its events."""
    words = [sys.executable, MISBEHAVING, how, *launch_words(folder, data, sets)[3:]]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        deadline, events = time.monotonic() + RUN_SECONDS, folder / "events.jsonl"
        while stop_after and not (events.exists() and stop_after in events.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        if stop_after:
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=RUN_SECONDS)
    return Run(process.returncode, output, folder)


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
        f"model of step 40 in {undisturbed_run.folder}/checkpoints/step-00000040; as one file: ecrm export"
        in undisturbed_run.output
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
    again = resume(tmp_path / "again", criteo_rows, undisturbed_run.folder, BASE)
    assert again.model == undisturbed_run.model and again.summary["checkpoint_step"] == 40, (
        "kept in its own folder, too"
    )


@pytest.mark.drill
@pytest.mark.parametrize("stopped", [False, True], ids=["finished", "stopped"])
def test_a_model_that_could_not_be_kept_is_told_last_with_a_code_of_its_own(
    tmp_path, criteo_rows, undisturbed, stopped
):
    sets = {
        **BASE,
        "train.steps": 40 if not stopped else 4000,
        "checkpoint.mode": "async" if stopped else "sync",
    }
    run = launch_as(
        "no room for dense.bin",
        tmp_path / "run",
        criteo_rows,
        sets,
        '"progress"' if stopped else "",
    )
    assert run.code == NotKept.exit_code == 7, run.output
    (error,) = [line for line in run.output.splitlines() if "error" in line]
    assert run.output.splitlines()[-1] == error and error.endswith("No space left on device"), (
        run.output
    )
    told = json.loads((run.folder / ("stopped.json" if stopped else "summary.json")).read_text())
    check_summary(told, STOPPED if stopped else SUMMARY)
    assert error.startswith(f"ecrm: error: the model of step {told['steps']} is not kept: ")
    assert told["checkpoint_step"] is None and "No space left" in told["checkpoint_failed"]
    assert stopped or (run.model == undisturbed and told["completed"])
    assert not list((run.folder / "checkpoints").iterdir())


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

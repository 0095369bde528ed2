"""A model that could not be kept is told last, with an exit code of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ecrm.base.errors import NotKept
from ecrm.run.files import STOPPED, SUMMARY, check_summary
from support.drilling import BASE, RUN_SECONDS, Run, launch_words, resume
from support.paths import PROGRAMS

MISBEHAVING = str(PROGRAMS / "misbehaving.py")


def launch_as(how: str, folder: Path, data: Path, sets: dict, stop_after: str = "") -> Run:
    """A launch on whose ranks something is missing.

    It is asked to stop as soon as `stop_after` is in its events.
    """
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
    assert error.startswith("ecrm: error: the model is not kept: no checkpoint of the last step: ")
    assert told["checkpoint_step"] is None and "No space left" in told["checkpoint_failed"]
    assert stopped or (run.model == undisturbed and told["completed"])
    assert not list((run.folder / "checkpoints").iterdir())


def test_a_complete_run_that_is_resumed_keeps_its_model_in_its_own_folder_too(
    tmp_path, criteo_rows, undisturbed_run
):
    again = resume(tmp_path / "again", criteo_rows, undisturbed_run.folder, BASE)
    assert again.model == undisturbed_run.model and again.summary["checkpoint_step"] == 40

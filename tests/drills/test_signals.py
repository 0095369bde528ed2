"""SIGINT and SIGTERM to a real run at difficult moments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ecrm.launch.machine import find_mpirun
from ecrm.process.linux import session_members
from support.drilling import RUN_SECONDS, launch, resume
from support.signalling import (
    MISBEHAVING,
    begun,
    check_codes,
    check_gone,
    environment,
    launch_line,
    launch_options,
    stopped_json,
)


def test_a_run_asked_to_stop_before_the_first_step_says_so(tmp_path, criteo_rows):
    folder = tmp_path / "run"
    line = launch_line(folder, criteo_rows, how="asked before the first step")
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=RUN_SECONDS, env=environment(folder)
    )
    assert done.returncode == 130, done.stdout + done.stderr
    assert (
        "stopped by SIGINT before the first step; 0 samples, 0 failures survived; in "
        in done.stdout
    )
    assert done.stderr == ""
    assert stopped_json(folder)["steps"] == 0
    check_gone(folder)
    check_codes(folder)


def test_a_reporter_that_cannot_write_stopped_json_leaves_that_to_another(tmp_path, criteo_rows):
    folder = tmp_path / "run"
    process = begun(folder, launch_line(folder, criteo_rows, how="no stopped.json:3"))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 130, output
    assert (
        "rank 3 cannot write" in output
        and "it leaves the run" in output
        and "Traceback" not in output
    ), output
    stopped = stopped_json(folder)
    assert [failure["ranks"] for failure in stopped["failures"]] == [[3]]
    check_gone(folder)
    check_codes(folder, dead=(3,))


@pytest.mark.parametrize("keeps", [True, False], ids=["keeps", "keeps nothing"])
@pytest.mark.parametrize("event", ["failure", "view", "resumed"])
def test_a_signal_while_rebuilding(tmp_path, criteo_rows, event, keeps):
    """One row a step: the signal comes long before the last one is back.

    A run that keeps its model brings all rows back before it writes them.
    """
    folder = tmp_path / "run"
    sets = ("protection.rebuild_rows_per_step=1", f"checkpoint.at_end={str(keeps).lower()}")
    process = begun(
        folder, launch_line(folder, criteo_rows, *sets, more=("--kill", "1@20:parity")), event
    )
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 130, output
    stopped = stopped_json(folder)
    assert [failure["ranks"] for failure in stopped["failures"]] == [[1]]
    assert stopped["failures_left"] == (1 if keeps else 0)
    check_gone(folder)
    check_codes(folder, dead=(1,))


@pytest.mark.parametrize("phase", ["evaluate", "recover"])
def test_a_signal_while_evaluating_or_recovering(tmp_path, criteo_rows, phase):
    """A rank in that phase sends the signal.

    The evaluation never ends, and no step follows the recovery.
    """
    folder = tmp_path / "run"
    kills = ("--kill", "1@20:parity") if phase == "recover" else ()
    line = launch_line(
        folder, criteo_rows, "train.eval_every_steps=30", more=kills, how=f"asked in {phase}:2"
    )
    done = subprocess.run(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECONDS,
        env=environment(folder),
    )
    assert done.returncode == 130, done.stdout
    events = [
        json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()
    ]
    assert (
        "evaluation" not in events
        and "resumed" not in events
        and ("failure" in events) == (phase == "recover")
    )
    assert stopped_json(folder)["steps"] == (20 if phase == "recover" else 30)
    check_gone(folder)
    check_codes(folder, dead=(1,) if phase == "recover" else ())


def mpirun_of_six() -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    ulfm = ["--with-ft", "ulfm", "--oversubscribe", *root, "--bind-to", "none"]
    return [str(find_mpirun()), *ulfm, "-n", "6"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_mpirun_itself(tmp_path, criteo_rows, number):
    """Open MPI leaves the ranks little time and drops what they print.

    They still stop, and no process is left.
    """
    folder = tmp_path / "run"
    program = [sys.executable, "-m", "ecrm", "train"]
    process = begun(folder, [*mpirun_of_six(), *program, *launch_options(folder, criteo_rows)])
    process.send_signal(number)
    process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 1
    deadline = time.monotonic() + 10
    while session_members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert session_members(process.pid) == []
    assert stopped_json(folder)["signal"] == "SIGTERM"  # what mpirun makes of either
    check_gone(folder)


def test_a_step_of_seconds_is_finished_though_mpirun_is_gone(tmp_path, criteo_rows):
    """The checkpoint is written and the line comes where mpirun prints its own.

    No shared memory is left.
    """
    folder, segments = tmp_path / "run", set(Path("/dev/shm").glob("sm_segment.*"))
    words = launch_options(folder, criteo_rows, "checkpoint.every_steps=1000000")
    process = subprocess.Popen(
        [*mpirun_of_six(), sys.executable, MISBEHAVING, "ask mpirun", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    _, errors = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 1, errors
    stopped = stopped_json(folder)
    assert (stopped["steps"], stopped["checkpoint_step"], stopped["signal"]) == (31, 31, "SIGTERM")
    assert f"stopped by SIGTERM after step 31 of 5000; {31 * 64:,} samples" in errors
    check_gone(folder)
    assert set(Path("/dev/shm").glob("sm_segment.*")) <= segments


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_where_there_are_checkpoints_one_is_written_at_the_stop(tmp_path, criteo_rows, mode):
    """Though a shard is rebuilding, one row a step."""
    folder = tmp_path / "run"
    sets = (
        "checkpoint.every_steps=1000000",
        f"checkpoint.mode={mode}",
        "protection.rebuild_rows_per_step=1",
    )
    process = begun(
        folder, launch_line(folder, criteo_rows, *sets, more=("--kill", "1@20:parity")), "failure"
    )
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 130, output
    stopped = stopped_json(folder)
    assert stopped["checkpoint_step"] == stopped["steps"] > 0
    assert f"checkpoint of step {stopped['steps']}; in " in output
    sets = {"train.steps": stopped["steps"] + 10, "model.dense_arch": "native"}
    run = resume(tmp_path / "on", criteo_rows, folder, sets)
    assert run.code == 0, run.output
    assert run.summary["resumed"]["step"] == stopped["steps"]
    assert run.model == launch(tmp_path / "undisturbed", criteo_rows, sets).model


def test_a_signal_to_one_rank_stops_the_run(tmp_path, criteo_rows):
    folder = tmp_path / "run"
    process = begun(folder, launch_line(folder, criteo_rows))
    os.kill(json.loads((folder / "ranks.json").read_text())["ranks"][2]["pid"], signal.SIGTERM)
    output, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 130, output
    assert stopped_json(folder)["failures"] == []
    check_gone(folder)
    check_codes(folder)

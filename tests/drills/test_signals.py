"""SIGINT and SIGTERM to a real run: all ranks stop after the same step, say how far they came, and are gone."""

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

from ecrm.files import STOPPED, check_summary, undescribed
from ecrm.launch.machine import find_mpirun
from ecrm.process.linux import session_members
from support.drilling import RUN_SECONDS, is_running, launch, resume
from support.paths import PROGRAMS

MISBEHAVING = str(PROGRAMS / "misbehaving.py")


def _words(folder: Path, data: Path, *sets: str) -> list[str]:
    words = ["tiny", "--run-dir", str(folder)]
    for one in (f"data.path={data}", "train.steps=5000", "model.dense_arch=native", *sets):
        words += ["--set", one]
    return words


def _begin(folder: Path, line: list[str], event: str = "progress") -> subprocess.Popen:
    """Start it and wait for the first such event."""
    process = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=_environment(folder),
    )
    deadline = time.monotonic() + RUN_SECONDS
    file = folder / "events.jsonl"
    while not file.exists() or f'"event": "{event}"' not in file.read_text():
        assert time.monotonic() < deadline and process.poll() is None, f"no {event}"
        time.sleep(0.02)
    return process


def _environment(folder: Path) -> dict[str, str]:
    codes = folder.with_name("codes")
    codes.mkdir()
    return {**os.environ, "OMP_NUM_THREADS": "1", "ECRM_TEST_CODES": str(codes)}


def _launch(
    folder: Path, data: Path, *sets: str, more: tuple[str, ...] = (), how: str = "nothing"
) -> list[str]:
    return [sys.executable, MISBEHAVING, how, "launch", *_words(folder, data, *sets), *more]


def _check_codes(folder: Path, dead: tuple[int, ...] = ()) -> None:
    """Every rank has ended with 0, but for those killed."""
    codes = {int(file.name): int(file.read_text()) for file in folder.with_name("codes").iterdir()}
    assert codes == {rank: -signal.SIGKILL if rank in dead else 0 for rank in range(6)}


def _stopped(folder: Path) -> dict:
    assert not (folder / "summary.json").exists()
    stopped = json.loads((folder / "stopped.json").read_text())
    check_summary(stopped, STOPPED)
    assert undescribed(folder) == []
    return stopped


def _check_gone(folder: Path) -> None:
    ranks = json.loads((folder / "ranks.json").read_text())["ranks"]
    assert [rank["pid"] for rank in ranks if is_running(rank["pid"])] == []


@pytest.mark.parametrize(
    ("number", "sets"),
    [
        (signal.SIGINT, ("protection.commit_interval=1000",)),
        pytest.param(signal.SIGTERM, (), marks=pytest.mark.drill),
    ],
)
def test_a_signal_to_the_launch_stops_all_ranks_after_the_same_step(
    tmp_path, criteo_rows, number, sets
):
    folder = tmp_path / "run"
    process = _begin(folder, _launch(folder, criteo_rows, *sets))
    process.send_signal(number)
    asked = time.monotonic()
    output, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 130, output
    assert time.monotonic() - asked < 9, "mpirun was not left to be killed"
    stopped = _stopped(folder)
    assert stopped["signal"] == number.name
    assert stopped["samples"] == stopped["steps"] * 64 and 5 <= stopped["steps"] < 5000
    assert 0.3 < stopped["train_logloss"] < 0.8
    line = rf"stopped by {number.name} after step {stopped['steps']} of 5000; .* in {re.escape(str(folder))}/stopped.json"
    assert len(re.findall(line, output)) == 1 and "error" not in output, output
    _check_gone(folder)
    _check_codes(folder)


@pytest.mark.drill
def test_a_run_asked_to_stop_before_the_first_step_says_so(tmp_path, criteo_rows):
    folder = tmp_path / "run"
    line = _launch(folder, criteo_rows, how="asked before the first step")
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=RUN_SECONDS, env=_environment(folder)
    )
    assert done.returncode == 130, done.stdout + done.stderr
    assert (
        "stopped by SIGINT before the first step; 0 samples, 0 failures survived; in "
        in done.stdout
    )
    assert done.stderr == ""
    assert (_stopped(folder)["steps"], _stopped(folder)["train_logloss"]) == (0, None)
    _check_gone(folder)
    _check_codes(folder)


@pytest.mark.drill
def test_a_reporter_that_cannot_write_stopped_json_leaves_that_to_another(tmp_path, criteo_rows):
    folder = tmp_path / "run"
    process = _begin(folder, _launch(folder, criteo_rows, how="no stopped.json:3"))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 130, output
    assert (
        "rank 3 cannot write" in output
        and "it leaves the run" in output
        and "Traceback" not in output
    ), output
    stopped = _stopped(folder)
    assert [failure["ranks"] for failure in stopped["failures"]] == [[3]]
    _check_gone(folder)
    _check_codes(folder, dead=(3,))


@pytest.mark.drill
@pytest.mark.parametrize("event", ["failure", "view", "resumed"])
def test_a_signal_while_rebuilding(tmp_path, criteo_rows, event):
    """One row a step: the signal comes long before the last one is back."""
    folder = tmp_path / "run"
    sets = ("protection.rebuild_rows_per_step=1",)
    process = _begin(
        folder, _launch(folder, criteo_rows, *sets, more=("--kill", "1@20:parity")), event
    )
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 130, output
    stopped = _stopped(folder)
    assert [failure["ranks"] for failure in stopped["failures"]] == [[1]]
    assert stopped["failures_left"] == 0
    _check_gone(folder)
    _check_codes(folder, dead=(1,))


@pytest.mark.drill
@pytest.mark.parametrize("phase", ["evaluate", "recover"])
def test_a_signal_while_evaluating_or_recovering(tmp_path, criteo_rows, phase):
    """A rank that is in that phase sends it: the evaluation never ends, no step follows the recovery."""
    folder = tmp_path / "run"
    kills = ("--kill", "1@20:parity") if phase == "recover" else ()
    line = _launch(
        folder, criteo_rows, "train.eval_every_steps=30", more=kills, how=f"asked in {phase}:2"
    )
    done = subprocess.run(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECONDS,
        env=_environment(folder),
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
    assert _stopped(folder)["steps"] == (20 if phase == "recover" else 30)
    _check_gone(folder)
    _check_codes(folder, dead=(1,) if phase == "recover" else ())


@pytest.mark.drill
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_mpirun_itself(tmp_path, criteo_rows, number):
    """Open MPI leaves the ranks little time and drops what they print; they stop all the same, and are gone."""
    folder = tmp_path / "run"
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    line = [
        str(find_mpirun()),
        "--with-ft",
        "ulfm",
        "--oversubscribe",
        *root,
        "--bind-to",
        "none",
        "-n",
        "6",
    ]
    process = _begin(
        folder, [*line, sys.executable, "-m", "ecrm", "train", *_words(folder, criteo_rows)]
    )
    process.send_signal(number)
    process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 1
    deadline = time.monotonic() + 10
    while session_members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert session_members(process.pid) == []
    assert _stopped(folder)["signal"] == "SIGTERM"  # what mpirun makes of either
    _check_gone(folder)


@pytest.mark.drill
def test_a_step_of_seconds_is_finished_though_mpirun_is_gone(tmp_path, criteo_rows):
    """And the checkpoint written, the line said where mpirun says its own, no shared memory left."""
    folder, segments = tmp_path / "run", set(Path("/dev/shm").glob("sm_segment.*"))
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    line = [
        str(find_mpirun()),
        "--with-ft",
        "ulfm",
        "--oversubscribe",
        *root,
        "--bind-to",
        "none",
        "-n",
        "6",
    ]
    words = _words(folder, criteo_rows, "checkpoint.every_steps=1000000")
    process = subprocess.Popen(
        [*line, sys.executable, MISBEHAVING, "ask mpirun", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    _, errors = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 1, errors
    stopped = _stopped(folder)
    assert (stopped["steps"], stopped["checkpoint_step"], stopped["signal"]) == (31, 31, "SIGTERM")
    assert f"stopped by SIGTERM after step 31 of 5000; {31 * 64:,} samples" in errors
    _check_gone(folder)
    assert set(Path("/dev/shm").glob("sm_segment.*")) <= segments


@pytest.mark.drill
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_where_there_are_checkpoints_one_is_written_at_the_stop(tmp_path, criteo_rows, mode):
    """Though a shard is rebuilding, one row a step."""
    folder = tmp_path / "run"
    sets = (
        "checkpoint.every_steps=1000000",
        f"checkpoint.mode={mode}",
        "protection.rebuild_rows_per_step=1",
    )
    process = _begin(
        folder, _launch(folder, criteo_rows, *sets, more=("--kill", "1@20:parity")), "failure"
    )
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 130, output
    stopped = _stopped(folder)
    assert stopped["checkpoint_step"] == stopped["steps"] > 0
    assert f"checkpoint of step {stopped['steps']}; in " in output
    sets = {"train.steps": stopped["steps"] + 10, "model.dense_arch": "native"}
    run = resume(tmp_path / "on", criteo_rows, folder, sets)
    assert run.code == 0, run.output
    assert run.summary["resumed"]["step"] == stopped["steps"]
    assert run.model == launch(tmp_path / "undisturbed", criteo_rows, sets).model


@pytest.mark.drill
def test_a_signal_to_one_rank_stops_the_run(tmp_path, criteo_rows):
    folder = tmp_path / "run"
    process = _begin(folder, _launch(folder, criteo_rows))
    os.kill(json.loads((folder / "ranks.json").read_text())["ranks"][2]["pid"], signal.SIGTERM)
    output, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 130, output
    assert _stopped(folder)["failures"] == []
    _check_gone(folder)
    _check_codes(folder)

"""Ranks that fail without being killed: stopped, leaving by themselves, dying before the first step or at the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from drilling import RUN_SECONDS, Run, is_running, launch


def _start(folder: Path, data: Path, *sets: str, program: tuple[str, ...] = ("-m", "ecrm")) -> subprocess.Popen:
    words = [sys.executable, *program, "launch", "tiny", "--run-dir", str(folder), "--set", f"data.path={data}"]
    for one in ("train.steps=400", "model.dense_arch=native", "protection.verify_parity_at_end=true", *sets):
        words += ["--set", one]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _ranks(folder: Path) -> list[dict]:
    deadline = time.monotonic() + RUN_SECONDS
    while not (folder / "events.jsonl").exists() or '"progress"' not in (folder / "events.jsonl").read_text():
        assert time.monotonic() < deadline, "training did not begin"
        time.sleep(0.05)
    return json.loads((folder / "ranks.json").read_text())["ranks"]


def _finish(process: subprocess.Popen, folder: Path) -> Run:
    """The run, which must be complete and its parity right."""
    output, _ = process.communicate(timeout=RUN_SECONDS)
    run = Run(process.returncode, output, folder)
    assert run.code == 0, output
    assert run.summary["parity"]["stripes"] > 0, output
    assert run.summary["parity"]["mismatches"] == 0, output
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, criteo_rows):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return _finish(_start(folder, criteo_rows), folder).model


def test_a_stopped_rank_is_fenced_and_recovered(tmp_path, criteo_rows, undisturbed):
    folder = tmp_path / "run"
    process = _start(folder, criteo_rows, "cluster.hang_seconds=1.0")
    stopped = next(rank["pid"] for rank in _ranks(folder) if rank["shards"] == [1])
    os.kill(stopped, signal.SIGSTOP)
    run = _finish(process, folder)
    assert run.model == undisturbed
    assert [failure["ranks"] for failure in run.summary["failures"]] == [[1]]
    assert 1.0 < run.summary["failures"][0]["stall_seconds"] < 5.0
    assert not is_running(stopped)


@pytest.mark.drill
def test_a_rank_stopped_for_less_is_left_alone(tmp_path, criteo_rows, undisturbed):
    folder = tmp_path / "run"
    process = _start(folder, criteo_rows, "cluster.hang_seconds=5.0")
    stopped = next(rank["pid"] for rank in _ranks(folder) if rank["shards"] == [1])
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(stopped, signal.SIGCONT)
    run = _finish(process, folder)
    assert run.model == undisturbed
    assert run.summary["failures"] == []


@pytest.mark.parametrize(
    "how",
    [
        "exit 3",
        "throw",
        "before the first step",
        *(pytest.param(how, marks=pytest.mark.drill) for how in ("exit 0", "out of memory", "segfault")),
    ],
)
def test_a_rank_that_ends_itself_is_recovered(tmp_path, criteo_rows, undisturbed, how):
    """tests/programs/misbehaving.py is `ecrm` in which rank 1 ends itself that way in step 30."""
    folder = tmp_path / "run"
    program = (str(Path(__file__).with_name("programs") / "misbehaving.py"), how)
    run = _finish(_start(folder, criteo_rows, program=program), folder)
    assert run.model == undisturbed
    assert [failure["ranks"] for failure in run.summary["failures"]] == [[1]]
    assert (how in ("throw", "out of memory")) == ("Traceback" in run.output), run.output


@pytest.mark.drill
def test_a_rank_that_alone_cannot_read_the_data_is_recovered(tmp_path, criteo_rows, undisturbed):
    """Rank 4, a trainer, finds garbage from row 3000 on; the others read the same rows and find nothing wrong."""
    folder = tmp_path / "run"
    program = (str(Path(__file__).with_name("programs") / "misbehaving.py"), "bad disk")
    run = _finish(_start(folder, criteo_rows, program=program), folder)
    assert run.model == undisturbed
    assert [failure["ranks"] for failure in run.summary["failures"]] == [[4]]
    assert run.output.count("ecrm: error: garbage") == 1


@pytest.mark.parametrize("protection", ["erasure", pytest.param("none", marks=pytest.mark.drill)])
def test_bad_data_ends_the_run_on_all_ranks_at_once(tmp_path, criteo_rows, protection):
    """An id of row 700 is not in its table: whoever reads it meets the same error, so nobody is taken for dead."""
    data = tmp_path / "data"
    shutil.copytree(criteo_rows, data)
    ids = np.memmap(data / "sparse.bin", "<i4", "r+").reshape(-1, 26)
    ids[700, 3] = -1
    ids.flush()
    run = launch(tmp_path / "run", data, {"train.steps": 40, "model.dense_arch": "native", "protection.name": protection})
    assert run.code == 4, run.output
    said = [line for line in run.output.splitlines() if "sparse.bin" in line]
    assert said == [f"ecrm: error: {data}/sparse.bin: an id in rows 672 to 703 is not in its table"]
    assert "died" not in run.output and "Traceback" not in run.output
    assert json.loads((run.folder / "failure.json").read_text())["exit_code"] == 4
    assert not (run.folder / "summary.json").exists()
    ranks = json.loads((run.folder / "ranks.json").read_text())["ranks"]
    assert [rank["pid"] for rank in ranks if is_running(rank["pid"])] == []

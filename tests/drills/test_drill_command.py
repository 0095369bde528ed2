"""Real drills: two runs under mpirun each, real SIGKILLs, and the reports about them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from ecrm.run.files import DRILL
from support.commands import ecrm
from support.examples import EXAMPLES, LAYOUT

DRILL_SECONDS = 200
BASE = (
    "model.dense_arch=native",
    "protection.rebuild_share=1",
    "protection.rebuild_rows_per_step=100000",
    "cluster.trainers=1",
)


def drill(folder: Path, data: Path, *words: str, sets: tuple[str, ...] = ()) -> tuple[int, str]:
    """Run a drill to its end, bounded in time: (exit code, what it printed)."""
    command = [sys.executable, "-m", "ecrm", "drill", "tiny", "--run-dir", str(folder), *words]
    for text in (f"data.path={data}", *BASE, *sets):
        command += ["--set", text]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=DRILL_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate()
        raise AssertionError(f"not finished after {DRILL_SECONDS} s\n{output}") from None
    return process.returncode, output


def numbers(folder: Path) -> dict:
    return json.loads((folder / "drill.json").read_text())


def test_scheduled_kills(tmp_path, criteo_rows):
    """The reporter and a trainer die; progress is told at the end alone, step times are there."""
    folder = tmp_path / "drill"
    sets = ("train.steps=40", "train.log_every_steps=50")
    code, output = drill(folder, criteo_rows, "--kill", "0@8:parity", "--kill", "3@24", sets=sets)
    assert code == 0, output
    found = numbers(folder)
    assert [(failure["ranks"], failure["step"]) for failure in found["failures"]] == [
        ([0], 8),
        ([3], 24),
    ]
    assert all(failure["stall_seconds"] > 0 for failure in found["failures"])
    assert found["failures"][0]["lost_bytes"] > 0
    assert [kill["scheduled"] for kill in found["kills"]] == ["0@8:parity", "3@24:input"]
    ranks = json.loads((folder / "disturbed" / "ranks.json").read_text())["ranks"]
    assert [kill["pid"] for kill in found["kills"]] == [ranks[0]["pid"], ranks[3]["pid"]], (
        "both from outside"
    )
    assert {path.name for path in folder.iterdir()} == {
        file.name.removesuffix("/*") for file in DRILL
    }
    assert '"event": "kill"' not in (folder / "disturbed" / "events.jsonl").read_text(), (
        "and nobody killed itself"
    )
    assert next(failure["phase"] for failure in found["failures"]) in ("parity", "update", "dense")
    assert (
        found["throughput"]["undisturbed"]["steps"]
        == found["throughput"]["disturbed"]["steps"]
        == 39
    )
    assert all(
        found["throughput"][part]["samples_per_second"] > 0
        for part in ("before", "during", "after")
    )
    assert (
        found["model_sha256_equal"]
        and f"model_sha256 equal: {found['disturbed']['model_sha256']}" in output
    )
    assert "train.log_every_steps is" not in output
    assert (folder / "timeline.svg").read_text().startswith("<svg ")
    assert "Passed." in (folder / "drill.html").read_text()


def script_drill(folder: Path, *kills: str) -> tuple[int, str]:
    """A drill of a script of 40 steps, with its own run folder."""
    line = ["drill", str(EXAMPLES / "two_tower.py"), *LAYOUT, "--run-dir", str(folder), *kills]
    done = ecrm(*line, "--", "--steps", "40", cwd=folder.parent, timeout=DRILL_SECONDS)
    return done.returncode, done.stdout + done.stderr


def test_a_drill_of_a_script(tmp_path):
    folder = tmp_path / "drill"
    code, output = script_drill(folder, "--kill", "1@9:parity", "--kill", "4@20")
    assert code == 0, output
    found = numbers(folder)
    assert found["model_sha256_equal"] and found["config"] == "two_tower"
    assert [failure["ranks"] for failure in found["failures"]] == [[1], [4]]
    assert all(kill["pid"] for kill in found["kills"]), "both from outside"
    assert found["throughput"]["disturbed"]["steps"] == 39
    assert found["throughput"]["disturbed"]["samples_per_second"] is None
    assert "useful steps/s" in output and "the same model to the bit" in output
    assert found["facts"]["command"].endswith("--kill 4@20:input -- --steps 40")
    assert "data" not in found["effective_config"] and "model" not in found["effective_config"]
    assert {path.name for path in folder.iterdir()} == {
        file.name.removesuffix("/*") for file in DRILL
    }


def test_a_kill_after_the_steps_of_a_script_is_refused_once_they_are_known(tmp_path):
    code, output = script_drill(tmp_path / "drill", "--kill", "1@40")
    assert code == 2, output
    assert "ecrm: error: --kill 1@40:input: there is no step 40, the last is 39" in output
    assert not (tmp_path / "drill" / "disturbed").exists()


def test_random_kills_from_outside(tmp_path, criteo_rows):
    folder = tmp_path / "drill"
    sets = ("train.steps=300", "cluster.spares=2")
    code, output = drill(
        folder, criteo_rows, "--mtbf", "0.05", "--kills", "2", "--seed", "1", sets=sets
    )
    assert code == 0, output
    found = numbers(folder)
    assert len(found["kills"]) == 2 and all(kill["pid"] and kill["time"] for kill in found["kills"])
    dead = [rank for failure in found["failures"] for rank in failure["ranks"]]
    assert sorted(dead) == sorted(kill["rank"] for kill in found["kills"])
    ranks = json.loads((folder / "disturbed" / "ranks.json").read_text())["ranks"]
    assert {entry["rank"] for entry in ranks if not entry["live"]} == set(dead)


def test_a_whole_host_is_killed_from_outside(tmp_path, criteo_rows):
    """Two ranks on each of four hosts; both ranks of one go at once, a server among them."""
    folder = tmp_path / "drill"
    sets = (
        "train.steps=60",
        "train.log_every_steps=50",
        "cluster.servers=4",
        "cluster.spares=3",
        "cluster.failure_domain=host",
        "testing.imitated_hosts=4",
    )
    code, output = drill(folder, criteo_rows, "--kill-host", "1@20", sets=sets)
    assert code == 0, output
    found = numbers(folder)
    assert found["effective_config"]["train"]["log_every_steps"] == 50
    assert sorted(kill["rank"] for kill in found["kills"]) == [1, 5]
    assert sorted(rank for failure in found["failures"] for rank in failure["ranks"]) == [1, 5]
    assert {kill["scheduled"] for kill in found["kills"]} == {"1@20"} and output.count(
        "! drill: SIGKILL to rank"
    ) == 2


def test_a_host_that_is_another_machine_fails_the_drill(tmp_path, criteo_rows, monkeypatch):
    """The ranks say that they run elsewhere, so the drill cannot kill them.

    The models are equal because nothing was killed, so the drill must fail.
    """
    folder = tmp_path / "drill"
    monkeypatch.setenv("ECRM_HOST", "elsewhere")
    sets = (
        "train.steps=30",
        "cluster.servers=4",
        "cluster.spares=3",
        "cluster.failure_domain=host",
        "testing.imitated_hosts=4",
    )
    code, output = drill(folder, criteo_rows, "--kill-host", "1@10", sets=sets)
    assert code == 1, output
    assert "ecrm: error: the drill failed: never happened: --kill-host 1@10" in output
    assert numbers(folder)["model_sha256_equal"]


def test_a_drill_can_fail(tmp_path, criteo_rows):
    """Without the undo after a failure, the model differs; the drill says so and exits with 1."""
    folder = tmp_path / "drill"
    code, output = drill(
        folder,
        criteo_rows,
        "--kill",
        "1@9:dense",
        sets=("testing.skip_undo=true", "cluster.spares=0"),
    )
    assert code == 1, output
    assert (
        "ecrm: error: the drill failed: model_sha256 NOT EQUAL" in output
        and "Traceback" not in output
    )
    assert (
        not numbers(folder)["model_sha256_equal"]
        and "Failed." in (folder / "drill.html").read_text()
    )

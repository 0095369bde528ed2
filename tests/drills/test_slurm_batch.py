"""deploy/ecrm.sbatch in a batch job of real Slurm: training, the stop, the queue, and going on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.drilling import LONG, RUN_SECONDS
from support.imitated_hosts import ImitatedHosts, why_not
from support.paths import ROOT
from support.slurm_cluster import SlurmCluster, why_no_slurm

MISSING = why_not() or why_no_slurm()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

QUEUE_SECONDS = 200
"""Slurm starts a requeued job after about two minutes."""


def until(holds: Callable[[], bool], seconds: float, output: Path) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        said = output.read_text() if output.exists() else ""
        assert time.monotonic() < deadline, said
        time.sleep(0.2)


def test_a_job_stopped_before_its_limit_goes_on_after_the_queue(
    tmp_path, criteo_rows, undisturbed_long
):
    private, output, folder = tmp_path / "private", tmp_path / "output", tmp_path / "run"
    private.mkdir()
    sets = {**LONG, "data.path": criteo_rows, "train.log_every_steps": 10}
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    words += ["--interface", "eth0"]
    sbatch = ["sbatch", "--parsable", "--nodes=3", f"--output={output}"]
    # a short name: slurmd's sockets lie in the folder
    with tempfile.TemporaryDirectory(prefix="sl") as short, ImitatedHosts(3) as hosts:
        cluster = SlurmCluster(hosts, Path(short) / "slurm", private)
        environment = {
            **os.environ,
            **cluster.variables,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "ECRM_RUN_DIR": str(folder),
            "TMPDIR": str(private),
        }
        try:
            job = subprocess.run(
                [*sbatch, str(ROOT / "deploy" / "ecrm.sbatch"), "tiny", *words],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert job.returncode == 0, job.stderr
            number = job.stdout.strip()
            until(lambda: steps(folder) >= 50, RUN_SECONDS, output)
            stop = ["scancel", "--batch", "--signal=TERM", number]  # as before the time limit
            subprocess.run(stop, env=environment, check=True, timeout=60)
            until(lambda: (folder / "stopped.json").exists(), RUN_SECONDS, output)
            until(lambda: (folder / "summary.json").exists(), QUEUE_SECONDS + RUN_SECONDS, output)
        finally:
            cluster.end()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["completed"] and summary["model_sha256"] == undisturbed_long
    assert "stopped by SIGTERM" in output.read_text() and "from step " in output.read_text()


def steps(folder: Path) -> int:
    """The last step that the events tell of."""
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    told = [json.loads(line) for line in lines if line.endswith("}")]
    return max((event["step"] for event in told if event["event"] == "progress"), default=0)

"""The files of deploy/: names and options in them are those of the program."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import textwrap
import time

import pytest

from ecrm.base import errors
from ecrm.cli.commands import make_parser
from ecrm.run.metrics_endpoint import METRICS
from support.commands import ecrm
from support.paths import ROOT

DEPLOY = ROOT / "deploy"
ECRM = """#!/bin/bash
echo "$@" >> "$FOLDER/launched"
if [ "$CODE" = wait ]; then
    trap 'sleep 0.3; exit 130' TERM
    touch "$FOLDER/waits"
    for _ in $(seq 300); do sleep 0.1; done
fi
exit "$CODE"
"""
SCONTROL = """#!/bin/bash
[ "$1" = show ] && printf 'node1\\nnode2\\n' || echo "$@" >> "$FOLDER/requeued"
"""


def test_the_dashboard_shows_every_metric_and_no_other():
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert set(re.findall(r"ecrm_\w+", " ".join(queries))) == set(METRICS) - {
        "ecrm_checkpoint_step"
    }
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_the_page_of_metrics_names_every_metric():
    page = (ROOT / "docs" / "operations" / "metrics.md").read_text()
    assert set(re.findall(r"`(ecrm_\w+)`", page)) == set(METRICS)


@pytest.fixture
def job(tmp_path):
    """Starts the batch script with stand-ins for `ecrm`, with this exit code, and `scontrol`."""
    for name, text in (("ecrm", ECRM), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def start(code: str, *typed: str) -> subprocess.Popen:
        own = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "FOLDER": str(tmp_path),
            "CODE": code,
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "ECRM_MOST_RESTARTS": "2",
        }
        words = ["bash", str(DEPLOY / "ecrm.sbatch"), *(typed or ["tiny"])]
        return subprocess.Popen(words, env=own, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    return start


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 6, 7, 8, 130])
def test_the_batch_script_requeues_what_can_go_on(job, tmp_path, code):
    assert job(str(code)).wait(30) == code
    requeued = (tmp_path / "requeued").exists()
    assert requeued == (code in (1, 3, 130))
    (line,) = (tmp_path / "launched").read_text().splitlines()
    own = "--set cluster.failure_domain=host"  # before the user's words, which win
    assert line.startswith(f"launch {own} --run-dir runs/slurm-77 --resume auto --hosts ")
    assert line.endswith(" --nodelist={host} tiny")
    hosts = (tmp_path / "runs" / "slurm-77.hosts").read_text()
    assert hosts == "node1 slots=2\nnode2 slots=2\n"


def test_the_batch_script_leaves_a_script_its_own_arguments(job, tmp_path):
    assert job("0", "train.py", "--config", "mine.toml", "--", "--epochs", "2").wait(30) == 0
    line = (tmp_path / "launched").read_text()
    assert line.endswith("={host} train.py --config mine.toml -- --epochs 2\n")


def test_the_batch_script_gives_up_after_so_many_losses_of_this_job(job, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "slurm-77.losses").write_text("177\n" * 9)  # another job's
    said = []
    for code in ("130", "3", "130", "1", "130", "3", "130"):
        process = job(code)
        said.append(process.communicate(timeout=30)[1])
        assert process.returncode == int(code)
    assert said == ["", "", "", "", "", "gave up after 2 restarts\n", ""]
    assert (tmp_path / "requeued").read_text() == "requeue 77\n" * 6


def test_before_the_time_limit_the_launch_stops_and_the_job_returns_to_the_queue(job, tmp_path):
    process = job("wait")
    deadline = time.monotonic() + 30
    while not (tmp_path / "waits").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130, "the code of the launch, and not of the signal"
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"


def test_the_manifest_names_its_own_parts_and_the_codes_of_the_program():
    text = (DEPLOY / "kubernetes.yaml").read_text()
    (codes,) = re.findall(r"values: \[([\d, ]+)\]", text)
    ours = {kind.exit_code for kind in vars(errors).values() if hasattr(kind, "exit_code")}
    assert {int(code) for code in codes.split(",")} == ours - {1, 3}
    (replicas,) = re.findall(r"replicas: (\d+)", text)
    assert f'name: HOSTS, value: "{replicas}"' in text
    assert "serviceName: ecrm\n" in text and '"$name.ecrm"' in text
    assert "{name: PODS, value: 10.244.0.0/16}" in text and ' --interface "$PODS"' in text
    assert " --set cluster.failure_domain=host " in text
    assert '"-o", "StrictModes=no"' in text, "all may write the folder of a mounted secret"
    for option in re.findall(r" (--[a-z-]+)", text.partition("exec ecrm launch")[2]):
        assert option in ecrm("launch", "--help").stdout


@pytest.mark.parametrize("answers", [True, False])
def test_the_job_writes_the_hosts_file_or_names_the_host_that_does_not_answer(tmp_path, answers):
    text = (DEPLOY / "kubernetes.yaml").read_text().partition("args:\n            - |\n")[2]
    command = textwrap.dedent(text.partition("          volumeMounts")[0])
    stand_ins = {"getent": 'echo "10.0.0.7 $2"', "sleep": "", "timeout": f"exit {int(not answers)}"}
    for name, does in {**stand_ins, "ecrm": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    own = {"HOSTS": "2", "SLOTS": "3", "PODS": "10.0.0.0/8", "WAIT": "0" if not answers else "30"}
    done = subprocess.run(
        ["bash", "-c", command.replace("/tmp/hosts", "hosts")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **own},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    if not answers:
        said = "ecrm-host-0 does not answer at port 22 after 0 s\n"
        assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
        return
    assert (tmp_path / "hosts").read_text() == (
        "ecrm-host-0 slots=3 address=10.0.0.7\necrm-host-1 slots=3 address=10.0.0.7\n"
    )
    given = make_parser().parse_args(done.stdout.splitlines())
    assert (given.config, given.interface, str(given.hosts)) == (
        "quickstart",
        "10.0.0.0/8",
        "hosts",
    )


def test_the_manifest_fits_the_schema_of_kubernetes():
    validate = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[deploy]'")
    yaml = pytest.importorskip("yaml")
    for part in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()):
        validate.validate(part, "1.31", strict=True)

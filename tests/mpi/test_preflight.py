"""Ranks that mpirun starts in a wrong way leave at once, with one line that says what to type."""

import os
import subprocess
import sys
import time

import pytest

from ecrm.launch.machine import find_mpirun
from support.commands import ecrm


@pytest.fixture
def dataset(criteo_rows):
    return f"data.path={criteo_rows}"


def train(dataset: str, *mpirun_words: str, config: str = "tiny", **environment: str) -> list[str]:
    """Run `ecrm train` under mpirun, check its exit code, return ECRM's lines of its stderr."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    began = time.monotonic()
    done = subprocess.run(
        [
            find_mpirun(),
            *root,
            "--oversubscribe",
            *mpirun_words,
            sys.executable,
            "-m",
            "ecrm",
            "train",
            config,
            "--set",
            dataset,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    assert done.returncode == 2
    assert time.monotonic() - began < 20
    assert "Traceback" not in done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("ecrm: ")]


@pytest.mark.parametrize("ranks", ["1", "5", "7"])
def test_a_wrong_number_of_ranks(dataset, ranks):
    (said,) = train(dataset, "--with-ft", "ulfm", "-n", ranks)
    assert "this config needs 6 ranks (3 servers + 2 trainers + 1 spare), " in said
    assert f"mpirun started {ranks}: type mpirun --with-ft ulfm " in said
    assert f"-n 6 ecrm train tiny --set {dataset}" in said


def test_mpirun_without_fault_tolerance(dataset):
    (said,) = train(dataset, "-n", "6")
    assert "mpirun was started without fault tolerance: type mpirun --with-ft ulfm" in said


def test_the_variable_alone_is_not_fault_tolerance(dataset):
    (said,) = train(dataset, "-n", "6", OMPI_MCA_mpi_ft_enable="1")
    assert "mpirun was started without fault tolerance: type mpirun --with-ft ulfm" in said


def test_a_config_error_is_told_once_by_all_ranks_together():
    (said,) = train("train.sead=1", "--with-ft", "ulfm", "-n", "6", config="quickstart")
    assert "did you mean train.seed?" in said


def test_no_mpirun_at_all(dataset):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))
    }
    done = ecrm("train", "tiny", "--set", dataset, env=environment)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert (
        "needs 6 ranks" in done.stderr
        and "was started without mpirun: type ecrm launch tiny" in done.stderr
    )

"""A script may start processes, leave files open and have handlers, as any program of Python."""

import gzip
import json
import os
import zipfile

import pytest

from support.commands import ecrm
from support.paths import PROGRAMS

TWO = ("--servers", "1", "--trainers", "1", "--spares", "0", "--protection", "none")
SCRIPT = "processes_of_a_script.py"
LINES = [str(number) for number in range(900)]


def run(tmp_path, mode: str, **environ: str):
    (tmp_path / "train.py").write_text((PROGRAMS / SCRIPT).read_text())
    words = ("launch", "train.py", *TWO, "--run-dir", "run", "--", mode, str(tmp_path))
    return ecrm(*words, cwd=tmp_path, timeout=100, env={**os.environ, **environ})


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run in an environment of a cluster's, and its folder."""
    folder = tmp_path_factory.mktemp("processes")
    # as a module for another Open MPI, and a batch system that is not here, would have it
    environ = {"OMPI_MCA_pml": "ucx", "OPAL_PREFIX": "/opt/none", "PMIX_RANK": "7"}
    environ |= {"SLURM_JOBID": "12", "SLURM_JOB_ID": "12", "SLURM_NODELIST": "a[1-9]"}
    finished = run(folder, "well", **environ)
    assert finished.returncode == 0, finished.stderr
    return finished, folder


def asked(folder) -> list[dict]:
    return [json.loads((folder / f"asked-{rank}.json").read_text()) for rank in range(2)]


def test_variables_of_another_open_mpi_are_named(done):
    assert "# OMPI_MCA_pml, OPAL_PREFIX, PMIX_RANK: set in the environment" in done[0].stdout


def test_hash_of_text_is_the_same_on_all_ranks(done):
    one, other = asked(done[1])
    assert one["hash"] == other["hash"]


def test_no_rank_of_one_machine_listens_on_the_network(done):
    assert [of["listening"] for of in asked(done[1])] == [[], []]


def test_processes_that_a_script_starts_end_by_sigterm(done):
    assert [of["ended"] for of in asked(done[1])] == [[-15, -15]] * 2


def left_whole(folder) -> None:
    for rank in range(2):
        assert (folder / f"rows-{rank}.csv").read_text().split() == LINES
        assert gzip.open(folder / f"rows-{rank}.gz", "rt").read().split() == LINES
        assert (folder / f"handled-{rank}").read_text() == "handled"
        assert (folder / f"before-{rank}.csv").read_text().split() == LINES
        assert (folder / f"thread-{rank}").read_text() == "through"
        assert (folder / f"holding-{rank}.csv").read_text() == "held"
        assert zipfile.ZipFile(folder / f"rows-{rank}.zip").read("rows") == b"all"
        assert not list(folder.glob("short-lived-*"))


def test_open_files_are_written_and_handlers_run(done):
    left_whole(done[1])


def test_an_object_in_a_cycle_from_before_the_training_ends(tmp_path):
    done = run(tmp_path, "ends cycles")
    assert done.returncode == 0, done.stderr
    left_whole(tmp_path)
    assert [(tmp_path / f"cycle-{rank}").read_text() for rank in range(2)] == ["ended"] * 2


@pytest.mark.parametrize("mode", ["fails", "fails unevenly"])
def test_open_files_are_written_and_handlers_run_after_an_error(mode, tmp_path):
    """Also on a rank that is 3 s slower: the other rank's guard waits."""
    failed = run(tmp_path, mode)
    assert failed.returncode == 8 and failed.stderr.count("Traceback") == 1
    left_whole(tmp_path)


SAID = "threads, handlers of atexit, or open files, took more than 10 s, and were left"


def test_a_handler_that_hangs_is_left_and_told(tmp_path):
    late = run(tmp_path, "hangs")
    assert late.returncode == 0
    assert late.stderr.count(SAID) == 1


@pytest.mark.drill
def test_a_handler_that_hangs_after_an_error_leaves_the_exit_code(tmp_path):
    """On all ranks: each rank has 10 s."""
    late = run(tmp_path, "fails slowly")
    assert late.returncode == 8
    assert SAID in late.stderr


def test_the_owner_alone_may_read_the_run_folder(done):
    assert (done[1] / "run").stat().st_mode & 0o777 == 0o700

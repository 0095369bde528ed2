"""Workers of data under mpirun: whom they belong to, what they save, and what they leave."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from shutil import copy

import pytest

from support.commands import ecrm
from support.drilling import Run
from support.examples import LAYOUT, dead_ranks
from support.paths import PROGRAMS

SECONDS = 0.06
"""What a batch takes to make, and the loop's body beside it."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Run:
    """Trainer 3 is killed, and spare 5 takes its slot over."""
    folder = tmp_path_factory.mktemp("fed")
    shared = shared_memory()
    copy(PROGRAMS / "slow_data_script.py", folder / "train.py")
    words = ("--run-dir", "run", "--profile", "--kill", "3@17:update")
    done = ecrm("launch", "train.py", *LAYOUT, *words, cwd=folder, timeout=200)
    run = Run(done.returncode, done.stdout + done.stderr, folder / "run")
    assert run.code == 0, run.output
    assert dead_ranks(run) == [3]
    assert shared_memory() <= shared
    return run


def shared_memory() -> set[str]:
    """Files in shared memory, without those of Open MPI."""
    return {path.name for path in Path("/dev/shm").iterdir() if "sm_segment" not in path.name}


def notes(run: Run, folder: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in (run.folder.parent / folder).iterdir()}


def test_ranks_with_slots_have_workers_from_when_they_have_slots_and_others_none(killed):
    ranks = {pid: int(rank) for rank, pid in notes(killed, "ranks").items()}
    parents = [name.partition("-")[0] for name in notes(killed, "workers")]
    of_rank = {rank: parents.count(pid) for pid, rank in ranks.items()}
    # those that train, and as many again for the evaluation, which rank 3 does not live to see
    assert of_rank == {0: 0, 1: 0, 2: 0, 3: 3, 4: 6, 5: 6}


def test_no_worker_outlives_its_rank(killed):
    left = notes(killed, "left")
    assert left and all(json.loads(orphans) == [] for orphans in left.values())
    workers = [name.partition("-")[2] for name in notes(killed, "workers")]
    assert not any(runs(worker) for worker in workers)


def runs(process: str) -> bool:
    """Whether it is there, and not only not yet buried by whoever has inherited it."""
    try:
        return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_batches_leave_no_descriptor_open(killed):
    counts = notes(killed, "fds")
    for rank in (3, 4):
        assert counts[f"{rank}-6"] == counts[f"{rank}-15"]


def test_neither_a_step_nor_an_evaluation_waits_for_batches(killed):
    (slowest,) = re.findall(r"^input +[\d.]+ +([\d.]+) \(rank", killed.output, re.MULTILINE)
    assert float(slowest) < 250 * SECONDS, "milliseconds a step; a rank alone waits for all 60"
    waits = {rank: json.loads(seconds) for rank, seconds in notes(killed, "waits").items()}
    fed = {rank: seconds for rank, seconds in waits.items() if seconds}
    assert sorted(fed) == ["4", "5"]
    for seconds in fed.values():
        assert seconds[0] > SECONDS, "nothing is made before the evaluation begins"
        assert statistics.median(seconds[1:]) < 0.25 * SECONDS

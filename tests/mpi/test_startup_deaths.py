"""Ranks killed or stopped before MPI is up: the run ends at once with one line, or survives."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

from ecrm.process.startup import NO_TORCH, Startup, died
from support.drilling import RUN_SECONDS
from support.starting import (
    LATE,
    WITHIN_SECONDS,
    Start,
    ended_with_one_line,
    first_process,
    guard_process,
    guarded_process,
    has_mapped,
)


def _in_mpi(pids: list[int]) -> int | None:
    """The guarded process once it has mapped MPI."""
    with contextlib.suppress(OSError):
        if len(pids) > 1 and has_mapped(pids[1], "libmpi.so"):
            return pids[1]
    return None


@pytest.mark.parametrize(
    "instant",
    [
        pytest.param(first_process, id="as mpirun starts it"),
        pytest.param(guard_process, id="its guard", marks=pytest.mark.drill),
        pytest.param(guarded_process, id="as its guard starts it", marks=pytest.mark.drill),
        pytest.param(_in_mpi, id="libmpi mapped", marks=pytest.mark.drill),
    ],
)
def test_a_rank_killed_while_it_starts(tmp_path, criteo_rows, instant):
    """Killed ever later, from its first sign of life on; after MPI_Init the run survives."""
    start = Start(tmp_path / "run", criteo_rows)
    os.kill(start.wait_for(instant), signal.SIGKILL)
    began = time.monotonic()
    while not (start.folder / "ranks.json").exists() and time.monotonic() < began + WITHIN_SECONDS:
        if not start.ranks(0):
            break
        time.sleep(0.05)
    trained = (start.folder / "ranks.json").exists()
    assert not trained or instant is _in_mpi
    code, output = start.end(
        RUN_SECONDS if trained else max(1.0, began + WITHIN_SECONDS - time.monotonic())
    )
    if trained:
        assert (start.folder / "summary.json").exists(), output
        return
    ended_with_one_line(code, output, died(1))
    assert not any(start.folder.glob("*")), "a run that never began leaves nothing"


def test_the_process_that_loads_torch_is_killed(tmp_path, criteo_rows):
    start = Start(tmp_path / "run", criteo_rows)
    os.kill(start.wait(start.server), signal.SIGKILL)
    code, output = start.end(WITHIN_SECONDS)
    ended_with_one_line(code, output, NO_TORCH)


def test_a_rank_killed_inside_mpi_init(tmp_path, criteo_rows):
    """Rank 2 keeps the others waiting there."""
    start = Start(tmp_path / "run", criteo_rows, program=LATE)
    pid = start.wait_for(_in_mpi)
    time.sleep(1.0)
    os.kill(pid, signal.SIGKILL)
    code, output = start.end(WITHIN_SECONDS)
    ended_with_one_line(code, output, died(1))


def test_a_start_without_end_is_ended(tmp_path, criteo_rows):
    """Nobody dies, but rank 2 never comes."""
    start = Start(tmp_path / "run", criteo_rows, "cluster.start_seconds=4.0", program=LATE)
    code, output = start.end(WITHIN_SECONDS + 4.0)
    error = "MPI was not up after 4 s (cluster.start_seconds): start the run again"
    ended_with_one_line(code, output, error)
    told = [line for line in output.splitlines() if line.startswith("waiting")]
    assert len(told) == 1, output
    assert re.fullmatch(
        r"waiting until torch is loaded, \d of 6 ranks have it: 2 s so far", told[0]
    )


def _startup(folder: Path, clock: list[float], rank: int = 0, ranks: int = 2) -> Startup:
    environ = {"PMIX_SERVER_TMPDIR": str(folder), "PMIX_NAMESPACE": "job@1", "PMIX_RANK": str(rank)}
    environ |= {"OMPI_COMM_WORLD_SIZE": str(ranks), "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks)}
    return Startup(120.0, 2.0, environ, lambda: clock[0])


def test_a_rank_that_is_there_is_no_trouble(tmp_path):
    clock = [0.0]
    _startup(tmp_path, clock, rank=1)
    startup = _startup(tmp_path, clock)
    for clock[0] in (0.5, 5.0, 100.0):
        assert startup.trouble() is None


def test_a_rank_that_is_away_for_a_moment_is_no_trouble(tmp_path):
    """mpirun forks ranks one after the other: the first may look before the last is there."""
    clock = [0.0]
    startup = _startup(tmp_path, clock)
    assert startup.trouble() is None
    clock[0] = 1.0
    assert startup.trouble() is None
    _startup(tmp_path, clock, rank=1)
    for clock[0] in (1.2, 3.0, 10.0):
        assert startup.trouble() is None


def test_without_a_folder_only_the_limit_counts(tmp_path):
    clock = [0.0]
    startup = _startup(tmp_path / "nowhere", clock)
    clock[0] = 119.0
    assert startup.trouble() is None
    clock[0] = 120.0
    assert "MPI was not up after 120 s" in startup.trouble()

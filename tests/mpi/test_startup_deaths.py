"""Ranks killed or stopped before MPI is up: the run ends at once with one line, or survives."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ecrm.process.startup import Startup
from support.drilling import RUN_SECONDS, Mpirun, mpirun_line
from support.paths import PROGRAMS

WITHIN_SECONDS = 10.0
"""From a death to the end of mpirun.

1.5 s to be sure, half a second between looks, and a machine that is not idle.
"""

LATE = (str(PROGRAMS / "late.py"),)


class Start(Mpirun):
    """`mpirun ... ecrm train` on the tiny config, started and not waited for."""

    def __init__(
        self, folder: Path, data: Path, *sets: str, program: tuple[str, ...] = ("-m", "ecrm")
    ) -> None:
        line = mpirun_line(folder, data, dict(one.split("=") for one in sets))
        at = line.index("-m", line.index(sys.executable))
        super().__init__([*line[:at], *program, *line[at + 2 :]])
        self.folder = folder

    def ranks(self, rank: int) -> list[int]:
        """Processes of a rank: the one that mpirun started, which becomes the guard, then the guarded."""
        found = []
        for pid in self.members:
            try:
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if f"PMIX_RANK={rank}".encode() in words:
                found.append((parent != self.process.pid, pid))
        return [pid for _, pid in sorted(found)]

    def wait_for(self, instant: Callable[[list[int]], int | None]) -> int:
        """The process of rank 1 that `instant` picks, as soon as it picks one."""
        deadline = time.monotonic() + RUN_SECONDS
        while time.monotonic() < deadline:
            pid = instant(self.ranks(1))
            if pid is not None:
                return pid
        raise AssertionError("rank 1 did not come so far")


def _mapped(library: str) -> Callable[[list[int]], int | None]:
    """The guarded process once it has mapped a library."""

    def instant(pids: list[int]) -> int | None:
        try:
            return (
                pids[1]
                if len(pids) > 1 and library in Path(f"/proc/{pids[1]}/maps").read_text()
                else None
            )
        except OSError:
            return None

    return instant


def _first(pids: list[int]) -> int | None:
    return pids[0] if pids else None


def _guard(pids: list[int]) -> int | None:
    return pids[0] if len(pids) > 1 else None


def _rank(pids: list[int]) -> int | None:
    return pids[1] if len(pids) > 1 else None


drill = pytest.mark.drill


@pytest.mark.parametrize(
    "instant",
    [
        pytest.param(_first, id="as mpirun starts it"),
        pytest.param(_guard, id="its guard", marks=drill),
        pytest.param(_rank, id="as its guard starts it", marks=drill),
        pytest.param(_mapped("libtorch_cpu"), id="importing torch", marks=drill),
        pytest.param(_mapped("libmpi.so"), id="libmpi mapped", marks=drill),
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
    assert not trained or "libmpi" in str(instant.__closure__[0].cell_contents)
    code, output = start.end(
        RUN_SECONDS if trained else max(1.0, began + WITHIN_SECONDS - time.monotonic())
    )
    if trained:
        assert (start.folder / "summary.json").exists(), output
        return
    _ended_with_one_line(code, output, "rank 1 died before MPI was up: start the run again")
    assert not any(start.folder.glob("*")), "a run that never began leaves nothing"


def test_a_rank_killed_inside_mpi_init(tmp_path, criteo_rows):
    """Rank 2 keeps the others waiting there."""
    start = Start(tmp_path / "run", criteo_rows, program=LATE)
    pid = start.wait_for(_mapped("libmpi.so"))
    time.sleep(1.0)
    os.kill(pid, signal.SIGKILL)
    code, output = start.end(WITHIN_SECONDS)
    _ended_with_one_line(code, output, "rank 1 died before MPI was up: start the run again")


@drill
@pytest.mark.parametrize(
    ("instant", "said"),
    [
        pytest.param(
            _first, "rank 1 was stopped before MPI was up, and is killed", id="as mpirun starts it"
        ),
        pytest.param(_guard, "rank 1 was stopped before MPI was up, and is killed", id="its guard"),
        pytest.param(_rank, "rank 1 died before MPI was up", id="guarded"),
    ],
)
def test_a_rank_stopped_while_it_starts(tmp_path, criteo_rows, instant, said):
    start = Start(tmp_path / "run", criteo_rows, "cluster.hang_seconds=1.0", program=LATE)
    os.kill(start.wait_for(instant), signal.SIGSTOP)
    code, output = start.end(WITHIN_SECONDS + 1.0)
    _ended_with_one_line(code, output, f"{said}: start the run again")


def test_a_start_without_end_is_ended(tmp_path, criteo_rows):
    """Nobody dies, but rank 2 never comes."""
    start = Start(tmp_path / "run", criteo_rows, "cluster.start_seconds=4.0", program=LATE)
    start.wait_for(_rank)
    code, output = start.end(WITHIN_SECONDS + 4.0)
    error = "MPI was not up after 4 s (cluster.start_seconds): start the run again"
    _ended_with_one_line(code, output, error)
    told = [line for line in output.splitlines() if line.startswith("waiting")]
    assert len(told) == 1, output
    assert re.fullmatch(
        r"waiting until torch is loaded, \d of 6 ranks have it: 2 s so far", told[0]
    )


def _ended_with_one_line(code: int, output: str, said: str) -> None:
    assert code == 3, output
    assert [line for line in output.splitlines() if "ecrm" in line or "Traceback" in line] == [
        f"ecrm: error: {said}"
    ]


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

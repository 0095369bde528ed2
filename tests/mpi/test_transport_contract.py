"""The contract of a transport under real mpirun with real SIGKILL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ecrm.base.errors import UsageError
from ecrm.transport.base import PeerFailure
from ecrm.transport.mpi import CLOSE_SECONDS, HEAD_FIELDS, Delivery, _check_fault_tolerance
from ecrm.transport.packed import EXCHANGE, MOST_APART
from support.mpirunning import mpirun
from support.paths import PROGRAMS, ROOT
from support.programs import transport_contract

RANKS = transport_contract.WORLD_SIZE
EXPECTED_SURVIVORS = list(transport_contract.SURVIVORS)


@pytest.mark.parametrize("waits", ["sleep", pytest.param("poll", marks=pytest.mark.drill)])
def test_contract_holds_on_mpi(tmp_path: Path, waits: str) -> None:
    output = mpirun(RANKS, PROGRAMS / "transport_contract.py", tmp_path, waits)
    results = read_results(tmp_path, output)
    assert sorted(results) == EXPECTED_SURVIVORS, output
    for result in results.values():
        assert result["live"] == EXPECTED_SURVIVORS
        assert result["failures_seen"][1:] == ["survived"] * 3
    busy = results[max(EXPECTED_SURVIVORS)]["busy"]
    # on a quiet machine a thirtieth; a loaded machine gives a rank that polls little time
    assert 0 < busy["sleep"] < busy["poll"] / 1.5
    alone, left = (results[rank]["close_seconds"] for rank in EXPECTED_SURVIVORS)
    assert alone < 1
    assert CLOSE_SECONDS <= left < 2 * CLOSE_SECONDS


@pytest.mark.parametrize(
    "waits, seed", [("poll", 1), pytest.param("sleep", 2, marks=pytest.mark.drill)]
)
def test_ranks_killed_at_random_instants_on_mpi(tmp_path: Path, waits: str, seed: int) -> None:
    ranks, kills, steps = 6, 3, 30
    output = mpirun(ranks, PROGRAMS / "transport_drill.py", tmp_path, waits, seed, kills, steps)
    results = read_results(tmp_path, output)
    assert len(results) == ranks - kills, output
    for result in results.values():
        assert result["live"] == sorted(results)
        assert result["steps"] == steps
        assert result["shrinks"] > 0


def read_results(folder: Path, output: str) -> dict[int, dict]:
    found = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert found, output
    return found


def test_one_rank_needs_no_mpirun() -> None:
    program = (
        "import os, sys, torch; from ecrm.transport.mpi import MpiTransport; t = MpiTransport();"
        "assert t.live == (0,) and t.agree(True) and "
        "t.share([torch.ones(2)])[0][0].tolist() == [1, 1];"
        "t.shrink(); assert t.live == (0,); t.close(); print('well'); "
        "sys.stdout.flush(); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.stdout == "well\n", done.stdout + done.stderr


def fake_mpi(library: str, size: int) -> SimpleNamespace:
    return SimpleNamespace(
        Get_library_version=lambda: library, COMM_WORLD=SimpleNamespace(Get_size=lambda: size)
    )


def test_mpi_without_fault_tolerance_is_refused_with_the_right_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMPI_MCA_mpi_ft_enable", raising=False)
    with pytest.raises(UsageError, match="mpirun --with-ft ulfm"):
        _check_fault_tolerance(fake_mpi("Open MPI v5.0.11, package: x", 4))
    _check_fault_tolerance(fake_mpi("Open MPI v5.0.11, package: x", 1))
    with pytest.raises(UsageError, match="MPICH"):
        _check_fault_tolerance(fake_mpi("MPICH Version: 4.2, x", 1))
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", "1")
    _check_fault_tolerance(fake_mpi("Open MPI v5.0.11, package: x", 4))


NONE_APART = [0] * MOST_APART


class SilentMpi:
    """A communicator of two whose receives succeed with `words` words, the rest having got lost."""

    INT64_T = INT32_T = None
    Status = lambda self: SimpleNamespace(Get_elements=lambda kind: self.now)  # noqa: E731

    def __init__(self, heads: list[int], words: list[int]) -> None:
        self.head, self.words, self.now = heads, list(words), 0

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 2

    def Isend(self, words: np.ndarray, peer: int) -> SimpleNamespace:
        return SimpleNamespace(Wait=self.nothing, Test=self.nothing)

    def Irecv(self, words: np.ndarray, peer: int) -> SimpleNamespace:
        words[: len(self.head)] = self.head
        looks = iter([False] * 20 + [True])
        return SimpleNamespace(
            Wait=self.came, Test=lambda status: next(looks) and self.came(status)
        )

    def nothing(self, status: object) -> bool:
        return True

    def came(self, status: object) -> bool:
        if self.words:
            self.now = self.words.pop(0)
        return True


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize(
    "head, words, complaint",
    [
        ([], [0], "nothing came from rank 1"),
        # the right number of words for an empty message, and nothing written
        ([], [HEAD_FIELDS], "nothing came"),
        ([], [480], "nothing came"),
        # one word of the head is missing
        ([3, 2, *NONE_APART, 9, 9, 9], [HEAD_FIELDS + 2], "nothing came"),
        ([1000, 2, *NONE_APART], [480, 1000 - 480], "half a message"),
        # of 100 words that travel apart
        ([1, 2, 400, *NONE_APART[1:], 9], [HEAD_FIELDS + 1, 99], "half a message"),
    ],
)
def test_success_reported_for_data_that_never_came_is_a_failure(
    head: list[int], words: list[int], complaint: str, sleeps: bool
) -> None:
    mpi = SilentMpi(head, words)
    with pytest.raises(PeerFailure, match=complaint):
        Delivery(mpi, mpi, [np.zeros(8, np.uint8)] * 2, [[], []], 1, EXCHANGE, sleeps).run()


def test_ranks_in_different_calls_are_told_apart_on_mpi() -> None:
    mpi = SilentMpi([0, 2 * 7 + 1, *NONE_APART], [HEAD_FIELDS])
    with pytest.raises(
        RuntimeError,
        match=r"number 1 is in its call 7 \(share\), number 0 in its call 1 \(exchange\)",
    ):
        Delivery(mpi, mpi, [np.zeros(8, np.uint8)] * 2, [[], []], 1, EXCHANGE, sleeps=False).run()

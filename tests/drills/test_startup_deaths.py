"""Ranks stopped before MPI is up, under a plain mpirun: the run ends with one line."""

from __future__ import annotations

import os
import signal

import pytest

from support.starting import (
    LATE,
    WITHIN_SECONDS,
    Start,
    ended_with_one_line,
    first_process,
    guard_process,
    guarded_process,
)


@pytest.mark.parametrize(
    ("instant", "said"),
    [
        pytest.param(
            first_process,
            "rank 1 was stopped before MPI was up, and is killed: start the run again",
            id="as mpirun starts it",
        ),
        pytest.param(
            guard_process,
            "rank 1 was stopped before MPI was up, and is killed: start the run again",
            id="its guard",
        ),
        pytest.param(
            guarded_process,
            "rank 1 died before MPI was up: correct the error that the rank has printed above; if "
            "there is no such error, start the run again",
            id="guarded",
        ),
    ],
)
def test_a_rank_stopped_while_it_starts(tmp_path, criteo_rows, instant, said):
    start = Start(tmp_path / "run", criteo_rows, "cluster.hang_seconds=1.0", program=LATE)
    os.kill(start.wait_for(instant), signal.SIGSTOP)
    code, output = start.end(WITHIN_SECONDS + 1.0)
    ended_with_one_line(code, output, said)

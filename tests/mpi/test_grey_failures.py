"""Ranks that fail without being killed: one is stopped, one ends itself."""

from __future__ import annotations

import os
import signal

import pytest

from support.drilling import is_running
from support.grey_failures import (
    HANG_SECONDS,
    finished,
    longest_gap,
    misbehaving,
    ranks_of,
    started,
)


def test_a_stopped_rank_is_fenced_and_recovered(tmp_path, criteo_rows, undisturbed_long):
    folder = tmp_path / "run"
    process = started(folder, criteo_rows, "cluster.hang_seconds=1.0")
    stopped = next(rank["pid"] for rank in ranks_of(folder) if rank["shards"] == [1])
    os.kill(stopped, signal.SIGSTOP)
    run = finished(process, folder)
    assert run.model == undisturbed_long
    assert [failure["ranks"] for failure in run.summary["failures"]] == [[1]]
    assert 1.0 < longest_gap(run) < 5.0
    assert not is_running(stopped)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("exit 3", marks=pytest.mark.drill),
        pytest.param("throw", marks=pytest.mark.drill),
        pytest.param("before the first step", marks=pytest.mark.drill),
        *(
            pytest.param(how, marks=pytest.mark.drill)
            for how in ("exit 0", "out of memory", "segfault")
        ),
    ],
)
def test_a_rank_that_ends_itself_is_recovered(tmp_path, criteo_rows, undisturbed_long, how):
    folder = tmp_path / "run"
    run = finished(started(folder, criteo_rows, program=misbehaving(how)), folder)
    assert run.code == 0, run.output
    assert run.model == undisturbed_long
    assert [failure["ranks"] for failure in run.summary["failures"]] == [[1]]
    # of which Open MPI would take for ever
    assert run.summary["failures"][0]["stall_seconds"] < HANG_SECONDS + 2
    assert (how in ("throw", "out of memory")) == ("Traceback" in run.output), run.output


@pytest.mark.parametrize(
    "rank",
    [
        pytest.param(1, id="server"),
        pytest.param(4, id="trainer", marks=pytest.mark.drill),
    ],
)
def test_a_rank_that_loops_for_ever_is_recovered_where_that_is_looked_for(
    tmp_path, criteo_rows, undisturbed_long, rank
):
    """The others wait for it in a call, and are left alone."""
    folder = tmp_path / "run"
    program = misbehaving(f"compute 100000:{rank}")
    run = finished(
        started(folder, criteo_rows, "cluster.stuck_seconds=3.0", program=program), folder
    )
    assert run.model == undisturbed_long
    assert [failure["ranks"] for failure in run.summary["failures"]] == [[rank]]
    assert 2.5 < run.summary["failures"][0]["stall_seconds"] < 8.0

"""Real SIGKILL under real mpirun: the finished model is the undisturbed one, bit for bit.

Each run has several kills. tests/drills/test_kills.py has one kill at a time.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time

import pytest

from ecrm.kernels import native
from support.drilling import (
    BASE,
    PHASES,
    REBUILT_AT_ONCE,
    RUN_SECONDS,
    Mpirun,
    Run,
    drill,
    is_running,
    kill_one_by_one,
    mpirun_line,
)
from support.paths import PROGRAMS


def _scores(run):
    return [run.summary[name] for name in ("eval_auc", "eval_logloss", "eval_samples")]


@pytest.mark.parametrize(
    ("interval", "portable"), [pytest.param(1, False, marks=pytest.mark.drill), (8, True)]
)
def test_servers_killed_in_every_phase_with_spares(
    tmp_path, criteo_rows, undisturbed, interval, portable
):
    """Eight servers die, one in each phase, each after the one before was rebuilt.

    The heir dies like the first owner. In the second case kernels are plain C++; in the undisturbed
    run they are not.

    Phases that only a step which commits has come first: with an interval of 8 that is step 7, and
    step 10, 8 after the rebuilding.
    """
    sets = {
        **BASE,
        "cluster.servers": 3,
        "cluster.spares": 8,
        "protection.commit_interval": interval,
    }
    sets |= REBUILT_AT_ONCE
    sets["kernels.instruction_set"] = instruction_set = (
        "portable" if portable else native.instruction_set()
    )
    others = kill_one_by_one(
        (2, 5, 6, 7, 8, 9),
        [phase for phase in PHASES if phase not in ("parity", "commit")],
        first=16,
        apart=4,
    )
    run = drill(tmp_path / "run", criteo_rows, sets, ("0@3:parity", "1@10:commit", *others))
    assert run.model == undisturbed
    ran = run.summary["kernels_ran"]
    assert ran.keys() >= {"parity_apply", "sparse_update", "decode"} and set(ran.values()) == {
        f"cpu ({instruction_set})"
    }, ran
    assert len(run.summary["failures"]) == 8
    assert all(failure["redone_steps"] <= interval for failure in run.summary["failures"])
    assert run.summary["failures_left"] == 1


@pytest.mark.drill
def test_without_spares_survivors_adopt(tmp_path, criteo_rows, undisturbed):
    """A server, a trainer and another server die; six servers (2,1) on eight ranks stay apart.

    Ranks sleep while they wait.
    """
    sets = {
        **BASE,
        "cluster.servers": 6,
        "cluster.spares": 0,
        "cluster.oversubscribed": "sleep",
        "cluster.stuck_seconds": 30,
        "protection.commit_interval": 8,
        **REBUILT_AT_ONCE,
        "train.profile": True,
    }
    run = drill(tmp_path / "run", criteo_rows, sets, ("1@5:parity", "7@13:dense", "2@21:update"))
    assert run.model == undisturbed
    assert run.summary["oversubscribed"] == (
        "sleep" if len(os.sched_getaffinity(0)) < run.summary["world_size"] else None
    )


def test_kill_inside_recovery_and_at_the_end(tmp_path, criteo_rows, undisturbed_run):
    """A trainer dies in the evaluation; another rank runs its slot, with the same result."""
    sets = {**BASE, "cluster.servers": 4, "cluster.spares": 3, "protection.k": 2, "protection.m": 2}
    sets |= REBUILT_AT_ONCE
    run = drill(
        tmp_path / "run",
        criteo_rows,
        sets,
        ("0@9:parity", "2@9:recover", "4@40:evaluate", "3@40:finish"),
    )
    assert run.model == undisturbed_run.model
    assert _scores(run) == _scores(undisturbed_run) and run.summary["eval_samples"] == 1200


@pytest.mark.drill
def test_slots_that_live_on_compute_no_step_twice(tmp_path, criteo_rows, undisturbed):
    """A server dies in parity, when slots have computed: each rank notes every backward it runs."""
    line = mpirun_line(
        tmp_path / "run",
        criteo_rows,
        {**BASE, "cluster.servers": 3, "cluster.spares": 1},
        ("1@9:parity",),
    )
    at = line.index("-m")
    backwards = tmp_path / "backwards"
    line[at : at + 2] = [
        str(PROGRAMS / "counting_backwards.py"),
        str(backwards),
    ]
    code, output = Mpirun(line).end(RUN_SECONDS)
    run = Run(code, output, tmp_path / "run")
    assert run.model == undisturbed
    assert [failure["redone_steps"] for failure in run.summary["failures"]] == [1]
    ran_on = backwards.read_text().splitlines()
    assert len(ran_on) == BASE["train.steps"] * BASE["train.slots"]
    cores = sorted(os.sched_getaffinity(0))
    assert run.summary["oversubscribed"] == (
        "bind" if len(cores) < run.summary["world_size"] else None
    )
    assert set(ran_on) == (
        {str([core]) for core in cores[:2]} if run.summary["oversubscribed"] else {str(cores)}
    )
    assert len(run.summary["shares_memory_with"]) == run.summary["world_size"] - 1
    sent = run.summary["traffic_bytes_per_rank"]
    # deltas; rows of the next step come with them
    assert sum(rank["shared"] for rank in sent) > sum(rank["sent"]["parity"] for rank in sent) / 4


@pytest.mark.parametrize(
    "layout", ["dedicated", pytest.param("colocated", marks=pytest.mark.drill)]
)
def test_more_than_m_at_once_ends_cleanly(tmp_path, criteo_rows, layout):
    """The printed mpirun line by itself: nobody else cleans up.

    Each rank runs under a program that notes its exit code.
    """
    sets = {
        **BASE,
        "cluster.servers": 3,
        "cluster.spares": 1,
        "cluster.layout": layout,
        "train.steps": 2000,
    }
    line = mpirun_line(tmp_path / "run", criteo_rows, sets, ("0@9:parity", "2@9:parity"))
    codes = tmp_path / "codes"
    codes.mkdir()
    at = line.index(sys.executable)
    noting = [sys.executable, str(PROGRAMS / "noting.py"), str(codes)]
    mpirun = Mpirun([*line[:at], *noting, *line[at:]])
    _, output = mpirun.end(RUN_SECONDS)
    ended = time.time()
    run = Run(3, output, tmp_path / "run")
    kills = run.events_of("kill")
    assert {kill["rank"] for kill in kills} == {0, 2}
    assert ended - max(kill["time"] for kill in kills) < 10
    ranks = json.loads((run.folder / "ranks.json").read_text())["ranks"]
    noted = {int(file.name): int(file.read_text()) for file in codes.iterdir()}
    assert set(noted) == {rank["rank"] for rank in ranks}
    assert noted[0] == noted[2] == -9
    assert {code for rank, code in noted.items() if rank not in (0, 2)} <= {
        3,
        -9,
    } and 0 not in noted.values(), noted
    assert 3 in noted.values(), noted
    (said,) = [text for text in output.splitlines() if "ecrm: " in text]
    assert re.match(
        r"ecrm: error: ranks? .*2 died: more was lost than erasure k=2 m=1 can bring back", said
    )
    assert "Traceback" not in output
    assert json.loads((run.folder / "failure.json").read_text())["exit_code"] == 3
    assert not (run.folder / "summary.json").exists()
    assert [rank["pid"] for rank in ranks if is_running(rank["pid"])] == []

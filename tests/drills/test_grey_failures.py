"""Ranks that fail without being killed, in every way, and ranks that are merely slow."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ecrm.process.linux import session_members
from support.core_dumps import mappings, why_no_core_files
from support.drilling import RUN_SECONDS, guard_of, is_running, launch
from support.grey_failures import (
    HANG_SECONDS,
    ended,
    finished,
    longest_gap,
    misbehaving,
    ranks_of,
    started,
)
from support.paths import PROGRAMS


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("rank_too", [True, False])
def test_a_stopped_guard_is_fenced_and_recovered_with_its_rank(
    tmp_path, criteo_rows, undisturbed_long, rank_too
):
    """`pkill -STOP -f` stops both: whoever would notice a stopped rank stands still too."""
    folder = tmp_path / "run"
    process = started(folder, criteo_rows, "cluster.hang_seconds=1.0")
    rank = next(rank["pid"] for rank in ranks_of(folder) if rank["shards"] == [1])
    guard = guard_of(rank)
    os.kill(guard, signal.SIGSTOP)
    if rank_too:
        os.kill(rank, signal.SIGSTOP)
    run = finished(process, folder)
    assert run.model == undisturbed_long
    assert [failure["ranks"] for failure in run.summary["failures"]] == [[1]]
    assert not is_running(rank) and not is_running(guard)
    assert not rank_too or 0.9 < longest_gap(run) < 5.0


def test_all_processes_stopped_together_go_on_when_they_are_continued(
    tmp_path, criteo_rows, undisturbed_long
):
    """`pkill -STOP -f ecrm`: for longer than a rank alone may stand."""
    folder = tmp_path / "run"
    process = started(folder, criteo_rows, "cluster.hang_seconds=1.0")
    ranks_of(folder)
    (mpirun,) = (
        int(word)
        for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    )
    everything = [process.pid, *session_members(mpirun)]
    assert len(everything) > 8
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in everything:
            os.kill(pid, number)
        time.sleep(3.0 if number == signal.SIGSTOP else 0.0)
    run = finished(process, folder)
    assert (run.model, run.summary["failures"]) == (undisturbed_long, [])
    assert longest_gap(run) > 3.0


def test_ctrl_z_stops_the_launch_but_not_the_run(tmp_path, criteo_rows, undisturbed_long):
    folder = tmp_path / "run"
    # else it may be one that the kernel does not stop
    process = started(folder, criteo_rows, process_group=0)
    ranks_of(folder)
    process.send_signal(signal.SIGTSTP)
    deadline = time.monotonic() + RUN_SECONDS
    while not (folder / "summary.json").exists() or _state(process.pid) != "T":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGCONT)
    run = finished(process, folder)
    assert (run.model, run.summary["failures"]) == (undisturbed_long, [])


def test_a_rank_stopped_for_less_is_left_alone(tmp_path, criteo_rows, undisturbed_long):
    """With its guard."""
    folder = tmp_path / "run"
    process = started(folder, criteo_rows, "cluster.hang_seconds=5.0")
    stopped = next(rank["pid"] for rank in ranks_of(folder) if rank["shards"] == [1])
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in (guard_of(stopped), stopped):
            os.kill(pid, number)
        time.sleep(1.0)
    run = finished(process, folder)
    assert run.model == undisturbed_long
    assert run.summary["failures"] == []


@pytest.mark.skipif(why_no_core_files() is not None, reason=str(why_no_core_files()))
def test_a_crash_that_dumps_core_leaves_out_what_ranks_lend(
    tmp_path, criteo_rows, undisturbed_long
):
    folder, cores = tmp_path / "run", tmp_path / "cores"
    cores.mkdir()
    process = started(folder, criteo_rows, cores=cores)
    ranks = {rank["rank"]: rank["pid"] for rank in ranks_of(folder)}
    lent = [
        (len(addresses), flags)
        for addresses, name, flags in mappings(ranks[1])
        if name.startswith("/memfd:ecrm")
    ]
    assert len(lent) == len(ranks) and all("dd" in flags for _, flags in lent)
    os.kill(ranks[1], signal.SIGSEGV)
    run = finished(process, folder)
    assert (run.model, [failure["ranks"] for failure in run.summary["failures"]]) == (
        undisturbed_long,
        [[1]],
    )
    (core,) = cores.iterdir()
    size, all_lent = core.stat().st_size, sum(size for size, _ in lent)
    print(f"{all_lent:,} bytes lent, core file of {size:,}, gap {longest_gap(run):.2f} s")
    assert 10 << 20 < size < 2 << 30 < all_lent / 20
    assert longest_gap(run) < HANG_SECONDS + 2


def test_a_rank_that_alone_cannot_read_the_data_is_recovered(
    tmp_path, criteo_rows, undisturbed_long
):
    """Rank 4, a trainer, finds garbage from row 3000 on.

    The others read the same rows and find nothing wrong.
    """
    folder = tmp_path / "run"
    program = (str(PROGRAMS / "misbehaving.py"), "bad disk")
    run = finished(started(folder, criteo_rows, program=program), folder)
    assert run.model == undisturbed_long
    assert [failure["ranks"] for failure in run.summary["failures"]] == [[4]]
    assert run.output.count("garbage: rank 4 leaves, and the slot is tried once more") == 1


@pytest.mark.parametrize("protection", ["erasure", "none"])
def test_bad_data_ends_the_run_on_all_ranks_at_once(tmp_path, criteo_rows, protection):
    """One id of row 700 is not in its table.

    Where the protection can do without the first rank that reads the row, another rank tries.
    """
    data = tmp_path / "data"
    shutil.copytree(criteo_rows, data)
    ids = np.memmap(data / "sparse.bin", "<i4", "r+").reshape(-1, 26)
    ids[700, 3] = -1
    ids.flush()
    run = launch(
        tmp_path / "run",
        data,
        {"train.steps": 40, "model.dense_arch": "native", "protection.name": protection},
    )
    assert run.code == 4, run.output
    said = [line for line in run.output.splitlines() if "sparse.bin" in line]
    last = json.loads((data / "manifest.json").read_text())["tables"]["t_cat_3"] - 1
    words = f"{data}/sparse.bin: row 700 has id -1 in table t_cat_3, whose ids are 0 to {last}"
    assert len(said) == (1 if protection == "none" else 2)
    assert words in said[-1] and said[-1].startswith("ecrm: error: ")
    assert "Traceback" not in run.output
    assert json.loads((run.folder / "failure.json").read_text())["exit_code"] == 4
    assert not (run.folder / "summary.json").exists()
    ranks = json.loads((run.folder / "ranks.json").read_text())["ranks"]
    assert [rank["pid"] for rank in ranks if is_running(rank["pid"])] == []


def test_a_rank_that_dies_at_exit_costs_nothing(tmp_path, criteo_rows, undisturbed_long):
    folder = tmp_path / "run"
    run = finished(started(folder, criteo_rows, program=misbehaving("at exit")), folder)
    assert run.code == 0, run.output
    assert (run.model, run.summary["failures"]) == (undisturbed_long, [])


@pytest.mark.parametrize(
    "kill", ["1@399:update", "3@399:commit", "1@400:evaluate", "3@400:evaluate", "4@200:evaluate"]
)
def test_a_death_in_the_last_step_or_in_evaluation_is_recovered(
    tmp_path, criteo_rows, undisturbed_long, kill
):
    folder = tmp_path / "run"
    run = finished(
        started(folder, criteo_rows, "train.eval_every_steps=200", kills=(kill,)), folder
    )
    assert run.code == 0, run.output
    assert run.model == undisturbed_long
    assert [failure["ranks"] for failure in run.summary["failures"]] == [[int(kill[0])]]


def test_all_trainers_may_die_while_servers_hold_the_dense_replica(
    tmp_path, criteo_rows, undisturbed_long
):
    folder = tmp_path / "run"
    sets = ("cluster.servers=4", "cluster.spares=0", "protection.k=2", "protection.m=2")
    run = finished(
        started(folder, criteo_rows, *sets, kills=("4@30:backward", "5@30:backward")), folder
    )
    assert run.code == 0, run.output
    assert run.model == undisturbed_long
    assert sorted(rank for failure in run.summary["failures"] for rank in failure["ranks"]) == [
        4,
        5,
    ]
    assert {
        rank["rank"]
        for rank in json.loads((folder / "ranks.json").read_text())["ranks"]
        if rank["slots"]
    } <= set(range(4))


def test_no_dense_replica_left_ends_the_run(tmp_path, criteo_rows):
    """m = 1: two trainers hold it. No row is lost with them."""
    folder = tmp_path / "run"
    run = ended(
        started(folder, criteo_rows, "cluster.spares=0", kills=("3@30:backward", "4@30:backward")),
        folder,
    )
    assert run.code == 3, run.output
    assert (
        "every replica of the dense model is lost"
        in json.loads((folder / "failure.json").read_text())["message"]
    )
    assert not (folder / "summary.json").exists()


def test_a_rank_that_computes_for_ten_seconds_is_not_killed(
    tmp_path, criteo_rows, undisturbed_long
):
    folder = tmp_path / "run"
    process = started(
        folder, criteo_rows, "cluster.hang_seconds=1.0", program=misbehaving("compute 10")
    )
    run = finished(process, folder)
    assert run.code == 0, run.output
    assert (run.model, run.summary["failures"]) == (undisturbed_long, [])
    assert run.summary["step_seconds"]["max"] > 10


def test_a_rank_that_gets_hardly_any_cpu_is_not_killed(tmp_path, criteo_rows, undisturbed_long):
    """All ranks share one core with two busy loops, one of which has the lowest priority.

    The ranks are stopped again and again.
    """
    folder = tmp_path / "run"
    core = min(os.sched_getaffinity(0))
    process = started(folder, criteo_rows, "cluster.hang_seconds=2.0", "train.steps=400")
    starved = next(rank["pid"] for rank in ranks_of(folder) if rank["shards"] == [1])
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for pid in (*(rank["pid"] for rank in ranks_of(folder)), *(one.pid for one in busy)):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), {core})
        os.setpriority(os.PRIO_PROCESS, starved, 19)
        stops = 0
        while process.poll() is None and is_running(starved) and stops < 20:
            os.kill(starved, signal.SIGSTOP)
            time.sleep(0.6)
            os.kill(starved, signal.SIGCONT)
            time.sleep(0.1)
            stops += 1
        run = finished(process, folder)
    finally:
        for one in busy:
            one.kill()
    assert run.code == 0, run.output
    assert (run.model, run.summary["failures"]) == (undisturbed_long, [])
    assert stops > 2


def test_a_reporter_that_cannot_write_leaves_the_run_to_the_others(
    tmp_path, criteo_rows, undisturbed_long
):
    folder = tmp_path / "run"
    run = finished(
        started(folder, criteo_rows, "train.log_every_steps=5", program=misbehaving("disk full:3")),
        folder,
    )
    assert run.code == 0, run.output
    assert run.model == undisturbed_long
    assert [failure["ranks"] for failure in run.summary["failures"]] == [[3]]
    assert (
        f"rank 3 cannot write {folder}/events.jsonl: File too large; it leaves the run"
        in run.output
    )
    assert [event["step"] for event in run.events_of("progress")] == list(range(5, 401, 5))


def test_a_run_folder_that_is_full_ends_the_run_with_one_line(tmp_path, criteo_rows):
    folder = tmp_path / "run"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "ecrm-test", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True) if shutil.which("mount") else None
    if done is None or done.returncode:
        pytest.skip(
            f"cannot mount a small file system: {done.stderr.strip() if done else 'no mount'}"
        )
    try:
        process = started(folder, criteo_rows, "train.log_every_steps=1", "train.steps=4000")
        ranks_of(folder)
        with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        run = ended(process, folder)
        assert run.code == 1, run.output
        errors = [line for line in run.output.splitlines() if "error" in line]
        assert errors[0] == (
            "ecrm: error: no rank can write into the run folder, so the run ends: "
            f"cannot write {folder}/events.jsonl: No space left on device"
        )
        assert len(errors) == 2 and "the run did not complete" in errors[1], run.output
        assert run.events[-1]["event"] == "progress"  # no torn line
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_what_a_dead_reporter_had_not_written_is_written(tmp_path, criteo_rows, undisturbed_long):
    """Rank 3 reports, and dies just before it reports rank 1's death.

    After that only the other ranks know of it.
    """
    folder = tmp_path / "run"
    program = misbehaving("before it tells of a failure:3")
    run = finished(
        started(
            folder, criteo_rows, "train.log_every_steps=5", program=program, kills=("1@30:update",)
        ),
        folder,
    )
    assert run.code == 0, run.output
    assert run.model == undisturbed_long
    assert sorted(rank for failure in run.events_of("failure") for rank in failure["ranks"]) == [
        1,
        3,
    ]
    assert [event["step"] for event in run.events_of("progress")] == list(range(5, 401, 5))
    assert [event["event"] for event in run.events].count("start") == 1

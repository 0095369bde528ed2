"""Watching over mpirun: nothing is left of any run, and success is the run's own marker."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from ecrm.launch import supervise as module
from ecrm.launch.launcher import RunFailed, judge
from ecrm.launch.machine import find_mpirun
from ecrm.launch.supervise import MpirunEnding, supervise
from ecrm.process.linux import SHARED_SEGMENT, session_members

STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], "pid" + os.environ["OMPI_COMM_WORLD_RANK"]).write_text(str(os.getpid()))
if os.environ["OMPI_COMM_WORLD_RANK"] == "1": os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(100)
"""


GUARDED = """
from ecrm.process.guard import guard
guard(hang_seconds=100, start_seconds=100)
"""
"""What every rank of a run begins with."""


def ranks_of(folder: Path, program: str = STUBBORN) -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [
        str(find_mpirun()),
        "--with-ft",
        "ulfm",
        *root,
        "--oversubscribe",
        "-n",
        "3",
        sys.executable,
        "-c",
        program,
        str(folder),
    ]


def started(folder: Path, count: int = 3) -> list[int]:
    """The pids of the ranks, once all have written theirs."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pids = [int(file.read_text() or 0) for file in folder.glob("pid*")]
        if len(pids) == count and all(pids):
            return pids
        time.sleep(0.02)
    raise AssertionError("the ranks did not start")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def when_started(folder: Path, action) -> threading.Thread:
    thread = threading.Thread(target=lambda: action(started(folder)), daemon=True)
    thread.start()
    return thread


def kill_mpirun(pids: list[int]) -> None:
    mpirun = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(mpirun, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_stopped_and_stubborn_ranks(tmp_path, number, monkeypatch):
    monkeypatch.setattr(module, "STOP_SECONDS", 1.0)
    when_started(tmp_path, lambda _: os.kill(os.getpid(), number))
    ending = supervise(ranks_of(tmp_path), tmp_path)
    assert ending.stopped_by == number
    assert not any(alive(pid) for pid in started(tmp_path))


def test_a_second_signal_ends_ranks_that_take_their_time_at_once(tmp_path):
    def twice(_):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    patient = STUBBORN.replace("SIGTERM", "SIGUSR1").replace("SIGSTOP", "SIGUSR1")
    when_started(tmp_path, twice)
    began = time.monotonic()
    assert supervise(ranks_of(tmp_path, patient), tmp_path).stopped_by == signal.SIGINT
    assert time.monotonic() - began < module.STOP_SECONDS
    assert not any(alive(pid) for pid in started(tmp_path))


def test_ranks_do_not_outlive_a_killed_mpirun(tmp_path):
    when_started(tmp_path, kill_mpirun)
    ending = supervise(ranks_of(tmp_path), tmp_path)
    assert (ending.exit_code, ending.stopped_by) == (-signal.SIGKILL, None)
    assert not any(alive(pid) for pid in started(tmp_path))


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path):
    program = (
        "from pathlib import Path; from ecrm.launch.supervise import supervise; "
        f"supervise({ranks_of(tmp_path, GUARDED + STUBBORN)!r}, Path({str(tmp_path)!r}))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program])
    pids = started(tmp_path)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def test_mpirun_that_lingers_after_the_run_is_done_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LINGER_SECONDS", 0.3)
    when_started(tmp_path, lambda _: (tmp_path / "summary.json").write_text('{"completed": true}'))
    ending = supervise(ranks_of(tmp_path), tmp_path)
    assert ending.stopped_by is None
    assert not any(alive(pid) for pid in started(tmp_path))
    judge(tmp_path, ending)


@pytest.mark.parametrize("over_hosts", [False, True])
def test_why_a_run_failed_is_told_again_where_the_rank_that_said_so_may_not_be_heard(
    tmp_path, over_hosts
):
    (tmp_path / "failure.json").write_text('{"message": "shards 1, 2 are lost", "exit_code": 3}')
    with pytest.raises(RunFailed) as failed:
        judge(tmp_path, supervise(["false"], tmp_path), over_hosts)
    assert (failed.value.exit_code, failed.value.told) == (3, not over_hosts)
    assert ("shards 1, 2 are lost" in str(failed.value)) == over_hosts and str(tmp_path) in str(
        failed.value
    )


def test_only_ranks_of_this_run_are_killed_by_pid(tmp_path):
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    rank = subprocess.Popen([*sleep, str(tmp_path)], start_new_session=True)
    # a pid used again by another program
    stranger = subprocess.Popen(sleep, start_new_session=True)
    # a rank of another host
    elsewhere = subprocess.Popen([*sleep, str(tmp_path)], start_new_session=True)
    try:
        host = socket.gethostname()
        entries = [
            {"pid": p.pid, "host": h}
            for p, h in ((rank, host), (stranger, host), (elsewhere, "other-" + host))
        ]
        (tmp_path / "ranks.json").write_text(json.dumps({"ranks": entries}))
        time.sleep(0.2)
        # reaped as by the daemon that would be its parent
        threading.Thread(target=rank.wait, daemon=True).start()
        supervise(["true"], tmp_path)
        assert not alive(rank.pid)
        assert alive(stranger.pid) and alive(elsewhere.pid)
    finally:
        for process in (rank, stranger, elsewhere):
            process.kill()


def test_session_files_are_apart_from_those_of_other_runs_and_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    program = (
        "import os; open(os.environ['OUT'] + os.environ['PMIX_RANK'], 'w')"
        ".write(os.environ['PMIX_SERVER_TMPDIR'])"
    )
    monkeypatch.setenv("OUT", str(tmp_path / "session"))
    supervise(ranks_of(tmp_path, program), tmp_path)
    folders = {Path((tmp_path / f"session{rank}").read_text()) for rank in range(3)}
    (folder,) = folders
    assert folder.parent.parent == tmp_path and folder.parent.name.startswith("ecrm-")
    assert not folder.parent.exists()


def test_shared_memory_is_given_back_when_mpirun_was_killed(tmp_path):
    segment = f"{SHARED_SEGMENT}test-{os.getpid()}"
    program = """
import mmap, os, pathlib, sys, time
file = open(sys.argv[2], "w+b"); file.truncate(4096); memory = mmap.mmap(file.fileno(), 4096)
pathlib.Path(sys.argv[1], "pid" + os.environ["OMPI_COMM_WORLD_RANK"]).write_text(str(os.getpid()))
time.sleep(100)
"""
    when_started(tmp_path, kill_mpirun)
    supervise([*ranks_of(tmp_path, program), segment], tmp_path)
    assert not Path(segment).exists()


def test_session_members_are_found_and_zombies_are_not():
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert session_members(process.pid) == [process.pid]
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert session_members(process.pid) == []
    process.wait()


def test_a_run_that_stopped_when_asked_to_has_said_so_itself(tmp_path):
    (tmp_path / "stopped.json").write_text('{"steps": 7, "signal": "SIGTERM"}')
    for ending in (
        MpirunEnding(0, signal.SIGINT),
        MpirunEnding(0, signal.SIGTERM),
        MpirunEnding(1, None),
    ):
        with pytest.raises(
            RunFailed, match="has stopped when asked to; see .*stopped.json"
        ) as caught:
            judge(tmp_path, ending)
        assert caught.value.exit_code == 130 and caught.value.told
    (tmp_path / "summary.json").write_text('{"completed": true}')
    judge(tmp_path, MpirunEnding(0, signal.SIGINT))  # it was done already


def test_only_the_completion_marker_is_success(tmp_path):
    fine = MpirunEnding(0, None)
    with pytest.raises(RunFailed, match=r"did not complete \(mpirun ended with 0\)") as caught:
        judge(tmp_path, fine)
    assert caught.value.exit_code == 1
    assert not tmp_path.exists()  # the empty folder that the launch had made

    tmp_path.mkdir()
    (tmp_path / "summary.json").write_text('{"completed": tru')
    with pytest.raises(RunFailed, match="see "):
        judge(tmp_path, fine)
    (tmp_path / "summary.json").write_text('{"completed": true}')
    judge(tmp_path, MpirunEnding(1, None))


@pytest.mark.parametrize(
    ("ending", "failure", "code", "said"),
    [
        (
            MpirunEnding(0, None),
            {"message": "stripe 12: ranks 5, 9 lost", "exit_code": 3},
            3,
            "failure.json",
        ),
        (MpirunEnding(1, signal.SIGTERM), None, 130, "stopped by SIGTERM"),
        (MpirunEnding(-9, None), None, 1, "mpirun died of SIGKILL"),
        (MpirunEnding(2, None), None, 2, "mpirun ended with 2"),
        (MpirunEnding(4, None), None, 4, "mpirun ended with 4"),
        (MpirunEnding(200, None), None, 1, "mpirun ended with 200"),
    ],
)
def test_a_failed_run_says_why_and_how(tmp_path, ending, failure, code, said):
    if failure:
        (tmp_path / "failure.json").write_text(json.dumps(failure))
    with pytest.raises(RunFailed, match=said) as caught:
        judge(tmp_path, ending)
    assert caught.value.exit_code == code
    # then a rank has said why: no second error line
    assert caught.value.told == (code in (2, 3, 4))


LATE = "[here:7] pmix_ptl_base: send_msg: write failed: Broken pipe (32) [sd = 23]"
IMITATED_MPIRUN = """
import json, pathlib, sys
folder, late, *fields = sys.argv[1:]
if fields:
    pathlib.Path(folder, "summary.json").write_text(fields[0])
print("ecrm: error: something", late, sep="\\n", file=sys.stderr)
print("the last words", end="", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("summary", "late_lines"),
    [
        ({"completed": True, "launch": "mine"}, 0),
        ({"completed": True, "launch": "mine", "checkpoint_failed": "full"}, 1),
        ({"completed": True, "launch": "another"}, 1),
        (None, 1),
    ],
)
def test_news_for_ranks_that_have_left_is_dropped_after_the_end_of_a_complete_run(
    tmp_path, capfd, summary, late_lines
):
    """mpirun tells one rank of the end of another.

    This is no error once all ranks have done their work.
    """
    fields = [] if summary is None else [json.dumps(summary)]
    line = [sys.executable, "-c", IMITATED_MPIRUN, str(tmp_path), LATE, *fields]
    assert supervise(line, tmp_path, launch="mine").exit_code == 0
    said = capfd.readouterr().err
    assert said.count(LATE) == late_lines
    assert said.startswith("ecrm: error: something\n") and said.endswith("the last words")


def test_an_mpirun_that_has_no_ranks_is_given_up(tmp_path, monkeypatch):
    """As one did that waited for itself while it began."""
    monkeypatch.setattr(module, "RANKLESS_SECONDS", 2.0)
    ending = supervise(["sleep", "100"], tmp_path)
    with pytest.raises(
        RunFailed, match="mpirun had no rank for 2 s, and was killed: start it again"
    ):
        judge(tmp_path, ending)

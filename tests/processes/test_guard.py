"""A guard and its rank as two processes without MPI: stopped, continued, failing, asked to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecrm.process.neighbours import JOB, RANK, PidNotes
from ecrm.process.preflight import JOB_FOLDER
from support.drilling import is_dying, is_running, niceness

# The rank prints its pid, notes SIGINT and ends with 7 when it is told to.
PROGRAM = """
import os, signal, sys, time
from ecrm.process.guard import guard, hold_signals
{before}
hold_signals()
guarded = guard({hang}, 100.0, {stuck}, {gpu_hang}, load=("json",))
signal.signal(signal.SIGINT, lambda *_: print("asked", flush=True))
guarded.up()
print(os.getpid(), flush=True)
{after}
sys.stdin.readline()
guarded.done(7)
os._exit(7)
"""


@pytest.fixture(params=["forked by a server", "forked by the guard"])
def start(request, tmp_path) -> Iterator[Callable[..., tuple[subprocess.Popen, int]]]:
    guards = []
    job = {JOB_FOLDER: str(tmp_path), RANK: "0"} if request.param == "forked by a server" else {}

    def begin(
        before: str = "",
        after: str = "",
        hang: float = 5.0,
        stuck: float = 0.0,
        gpu_hang: float = 10.0,
    ) -> tuple[subprocess.Popen, int]:
        line = [
            sys.executable,
            "-c",
            PROGRAM.format(before=before, after=after, hang=hang, stuck=stuck, gpu_hang=gpu_hang),
        ]
        guards.append(
            subprocess.Popen(
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **job, JOB: f"job {len(guards)}"},
            )
        )
        return guards[-1], int(guards[-1].stdout.readline())

    yield begin
    for guard in guards:
        guard.kill()
        guard.communicate()


def test_a_guard_stopped_for_a_while_goes_on(start):
    guard, rank = start()
    for _ in range(3):
        os.kill(guard.pid, signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(guard.pid, signal.SIGCONT)
        time.sleep(0.1)
    assert guard.poll() is None and is_running(rank)
    guard.send_signal(signal.SIGUSR1)
    assert guard.stdout.readline() == "asked\n"
    _, errors = guard.communicate("\n", timeout=20)
    assert (guard.returncode, errors) == (7, "")


def test_a_rank_asked_to_stop_before_mpi_is_up_has_its_limit_still():
    """The others may wait in MPI_Init for one that never comes."""
    program = (
        PROGRAM.format(before="", after="", hang=5.0, stuck=0.0, gpu_hang=10.0)
        .replace("100.0", "5.0")
        .replace("guarded.up()", "")
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as guard:
        rank = int(guard.stdout.readline())
        guard.send_signal(signal.SIGUSR1)
        # on a slow machine a line of the guard's own may come before
        assert "asked\n" in iter(guard.stdout.readline, "")
        assert guard.wait(20) == 3 and not is_running(rank)
        assert guard.stderr.read() == "", "it was asked to stop"


@pytest.fixture
def named_as_mpirun() -> Iterator[None]:
    """This process has the name of mpirun, as the parent of guards."""
    comm = Path(f"/proc/{os.getpid()}/comm")
    name = comm.read_text()
    comm.write_text("prterun")
    yield
    comm.write_text(name)


def ends_of_two(folder: Path, program: str, *codes: int) -> list[int]:
    """The exit codes of two guards of a job, started by this process, in ascending order."""
    guards = [
        subprocess.Popen(
            [sys.executable, "-c", program.replace("(7)", f"({code})")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, JOB_FOLDER: str(folder), JOB: "job", RANK: str(rank)},
        )
        for rank, code in enumerate(codes)
    ]
    try:
        for guard in guards:
            guard.stdout.readline()  # the rank is up, or the start has failed
        for guard in guards:
            with contextlib.suppress(BrokenPipeError):
                guard.stdin.write(b"\n")
        for guard in guards:
            guard.wait(20)
    finally:
        for guard in guards:
            guard.kill()
            guard.stdin.close()
            guard.stdout.close()
    return sorted(guard.returncode for guard in guards)


WHOLE = PROGRAM.format(before="", after="", hang=5.0, stuck=0.0, gpu_hang=10.0)
NEVER_UP = WHOLE.replace("100.0", "1.0").replace("guarded.up()", "time.sleep(60)")


@pytest.mark.parametrize(
    ("codes", "ends"),
    [
        pytest.param((7, 7), [-signal.SIGKILL, 7], id="two errors"),
        pytest.param((0, 7), [0, 7], id="an error beside a success"),
        pytest.param((0, 0), [0, 0], id="two successes"),
    ],
)
def test_mpirun_gets_the_error_code_of_a_single_rank(tmp_path, named_as_mpirun, codes, ends):
    """mpirun counts an end by an error code twice, and may crash then."""
    assert ends_of_two(tmp_path, WHOLE, *codes) == ends


def test_mpirun_gets_one_error_code_of_a_start_that_failed(tmp_path, named_as_mpirun):
    assert ends_of_two(tmp_path, NEVER_UP, 7, 7) == [-signal.SIGKILL, 3]


def test_a_program_that_starts_guards_gets_the_error_codes_of_all(tmp_path):
    """An agent, or a user's program between mpirun and the guard."""
    PidNotes({JOB_FOLDER: str(tmp_path), JOB: "job"}).put(9, os.getpid())
    assert ends_of_two(tmp_path, WHOLE, 7, 7) == [7, 7]


def test_both_stopped_for_longer_than_allowed_and_the_guard_continued_first_go_on(start):
    """As all processes of a run are by Ctrl-Z, or with the machine."""
    guard, rank = start(hang=2.0)
    os.kill(rank, signal.SIGSTOP)
    time.sleep(0.7)  # the guard has seen it
    os.kill(guard.pid, signal.SIGSTOP)
    time.sleep(3.0)
    os.kill(guard.pid, signal.SIGCONT)
    time.sleep(0.1)
    os.kill(rank, signal.SIGCONT)
    time.sleep(0.7)
    guard.communicate("\n", timeout=20)
    assert guard.returncode == 7


def test_a_rank_that_stays_stopped_is_killed(start):
    guard, rank = start(hang=1.0)
    os.kill(rank, signal.SIGSTOP)
    assert guard.wait(10) == -signal.SIGKILL and not is_running(rank)


def test_a_rank_whose_gpu_gives_no_answer_is_killed_after_a_time_of_its_own(start):
    guard, rank = start(after="guarded.pulse.question()", hang=100.0, gpu_hang=1.0)
    assert guard.wait(10) == -signal.SIGKILL and not is_running(rank)
    assert "not done for 1 s what it was given (cluster.gpu_hang_seconds)" in guard.stderr.read()


def test_a_rank_that_loops_for_ever_is_killed(start):
    guard, rank = start(after="with guarded.calls.call(): pass\nwhile True: pass", stuck=1.0)
    assert guard.wait(10) == -signal.SIGKILL and not is_running(rank)


@pytest.mark.parametrize(
    ("after", "stuck"),
    [
        ("with guarded.calls.call(): time.sleep(2.5)", 1.0),  # waits for others
        ("for _ in range(25):\n with guarded.calls.call(): time.sleep(0.1)", 1.0),
        ("time.sleep(2.5)", 1.0),  # before the first call
        ("with guarded.calls.call(): pass\ntime.sleep(2.5)", 0.0),
    ],
)
def test_a_rank_that_calls_or_waits_in_a_call_is_left_alone(start, after, stuck):
    guard, _ = start(after=after, stuck=stuck)
    time.sleep(2.8)
    guard.communicate("\n", timeout=20)
    assert guard.returncode == 7


def test_a_guard_does_not_wait_until_the_memory_of_its_rank_is_taken_back_and_has_that_done_beside(
    start,
):
    """Taking back 1 GiB in small pages takes some 85 ms; the guard needs a few.

    On a busy machine one of three attempts has to show it.
    """
    fill = """
import ctypes, mmap
memory = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
for advice in (15, 23):  # MADV_NOHUGEPAGE, MADV_POPULATE_WRITE
    assert ctypes.CDLL(None).madvise(address, ctypes.c_size_t(1 << 30), advice) == 0
print("filled", flush=True)
"""
    still_dying = []
    for _ in range(3):
        guard, rank = start(after=fill)
        assert guard.stdout.readline() == "filled\n"
        time.sleep(1.0)  # the guard learns that MPI is up at its next look
        os.kill(rank, signal.SIGKILL)
        assert guard.wait() == -signal.SIGKILL  # with a timeout it looks every 50 ms
        still_dying.append(niceness(rank) > 0 and is_dying(rank))
        assert not is_running(rank)
    assert any(still_dying)


def test_a_guard_with_an_error_of_its_own_is_killed_with_its_rank(start):
    """If it just left, mpirun would tell nobody."""
    guard, rank = start("from ecrm.process.neighbours import Neighbours; Neighbours.look = None")
    assert guard.wait(20) == -signal.SIGKILL and not is_running(rank)
    assert "TypeError" in guard.stderr.read()

"""A rank asked to stop takes the time that it needs; without its guard a bounded time."""

from __future__ import annotations

import subprocess
import sys
import time

from ecrm.process.guard import MPIRUN_GOES
from support.drilling import is_running

# A guard, which ends when it is told to, and its rank, which takes for ever to stop.
PROGRAM = """
import os, signal, sys, time
from ecrm.process import stop_signals as stop
from ecrm.process.fork_server import Tether
stop.LEAVE_SECONDS = 1
tied, held = os.pipe()
if (rank := os.fork()) == 0:
    os.close(held)
    tether = Tether(tied)
    tether.tie()
    signals = stop.StopSignals(os.getppid(), tether)
    os.kill(os.getpid(), signal.SIGINT)
    while signals.received is None:
        time.sleep(0.01)
    print(os.getpid(), signals.received.name, flush=True)
    time.sleep(100)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the rank alone holds the pipe: if it dies, that ends
sys.stdin.readline()
"""


def test_the_limit_begins_with_the_end_of_the_guard():
    guard = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pid, received = guard.stdout.readline().split()
    try:
        assert received == "SIGINT"
        time.sleep(2.0)
        assert is_running(int(pid)), "ended though its guard lives"
        guard.stdin.close()
        guard.wait(20)
        began = time.monotonic()
        while is_running(int(pid)):
            assert time.monotonic() - began < 10, "outlives its guard"
            time.sleep(0.05)
        assert time.monotonic() - began > 0.5, "had no time to stop"
    finally:
        guard.kill()
        guard.stdout.close()


def test_that_mpirun_goes_is_heard_also_after_a_request_to_stop():
    """All are asked to stop at once: a rank gets the signal, then its guard's for mpirun's end."""
    program = PROGRAM.replace(
        "    time.sleep(100)",
        f"""
    ours = os.dup(1)  # its own output will be that of mpirun, in whose place is this process
    os.kill(os.getpid(), {int(MPIRUN_GOES)})
    while not signals.orphaned:
        time.sleep(0.01)
    os.write(ours, b"alone\\n")
    time.sleep(100)""",
    )
    guard = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pid, _ = guard.stdout.readline().split()
    try:
        assert guard.stdout.readline() == "alone\n"
        began = time.monotonic()
        while is_running(int(pid)):  # its limit begins at once, the guard being there or not
            assert time.monotonic() - began < 10
            time.sleep(0.05)
    finally:
        guard.kill()
        guard.stdin.close()
        guard.stdout.close()


def test_a_request_is_heard_after_asyncio_has_taken_the_wakeup():
    program = PROGRAM.replace(
        "    os.kill(os.getpid(), signal.SIGINT)\n",
        """    signal.set_wakeup_fd(-1)  # as loop.remove_signal_handler does
    os.kill(os.getpid(), signal.SIGINT)
""",
    )
    guard = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        _, received = guard.stdout.readline().split()
        assert received == "SIGINT"
    finally:
        guard.kill()
        guard.stdin.close()
        guard.stdout.close()

"""A rank asked to stop takes the time that it needs while it has its guard, and a bounded time without."""

from __future__ import annotations

import subprocess
import sys
import time

from drilling import is_running

# A guard, which ends when it is told to, and its rank, which takes for ever to stop.
PROGRAM = """
import os, signal, sys, time
from ecrm.train import stop
stop.LEAVE_SECONDS = 1
if (rank := os.fork()) == 0:
    signals = stop.StopSignals()
    os.kill(os.getpid(), signal.SIGINT)
    while signals.received is None:
        time.sleep(0.01)
    print(os.getpid(), signals.received.name, flush=True)
    time.sleep(100)
sys.stdin.readline()
"""


def test_the_limit_begins_with_the_end_of_the_guard():
    guard = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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

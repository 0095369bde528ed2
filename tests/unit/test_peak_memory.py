"""The most memory of a run's ranks, by Pss, as benchmarks read it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from support.benchmarking import program

memory = program("lib.memory")
MB = 1_000_000
HOLDER = """
import mmap, os, sys
shared = mmap.mmap(-1, 64 << 20)
for at in range(0, 64 << 20, 4096):
    shared[at] = 1
child = os.fork()
if child == 0:
    for at in range(0, 64 << 20, 4096):
        shared[at]
print(os.getpid(), flush=True)
sys.stdin.readline()
"""


def ranks_of(folder, pids):
    host = os.uname().nodename
    ranks = [{"rank": n, "live": True, "host": host, "pid": pid} for n, pid in enumerate(pids)]
    (folder / "ranks.json").write_text(json.dumps({"ranks": ranks}))


def test_memory_that_two_ranks_share_counts_once(tmp_path):
    words = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(words, stdin=-1, stdout=-1, text=True) as process:
        pids = [int(process.stdout.readline()) for _ in range(2)]
        ranks_of(tmp_path, pids)
        with memory.PeakMemory(tmp_path) as peak:
            deadline = time.monotonic() + 20
            while not peak.bytes and time.monotonic() < deadline:
                time.sleep(0.05)
        resident = 0
        for pid in pids:
            status = open(f"/proc/{pid}/smaps_rollup").read().splitlines()
            resident += sum(int(line.split()[1]) for line in status if line.startswith("Rss:"))
        process.stdin.write("\n")
        process.stdin.write("\n")
    assert 67 * MB < peak.bytes < 110 * MB
    assert 1024 * resident > peak.bytes + 60 * MB, "the sum of resident memory counts it twice"


def test_a_run_without_ranks_has_no_memory(tmp_path):
    with memory.PeakMemory(tmp_path) as peak:
        time.sleep(3 * memory.EVERY_SECONDS)
    ranks_of(tmp_path, [999_999_999])
    with memory.PeakMemory(tmp_path) as gone:
        time.sleep(3 * memory.EVERY_SECONDS)
    assert (peak.bytes, gone.bytes) == (0, 0)

"""What this machine has: cores and memory, as Linux reports them."""

from __future__ import annotations

import os
from pathlib import Path

THREADS_OF_A_CORE = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def physical_cores() -> int:
    """Cores this process may use, hyperthreads of one core counted once, as mpirun counts its slots."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add(Path(THREADS_OF_A_CORE.format(cpu)).read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes of main memory."""
    kibibytes = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        kibibytes[name] = int(rest.split()[0])
    return kibibytes["MemTotal"] * 1024, kibibytes["MemAvailable"] * 1024

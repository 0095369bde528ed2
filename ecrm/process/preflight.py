"""Checks of a rank before MPI: was the rank started in a way that can survive a death?

The checks read only mpirun's environment and mpirun's command line. All ranks therefore come to the
same answer by themselves, in milliseconds, and can leave before MPI_Init.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ecrm.base.errors import UsageError
from ecrm.base.wording import counted
from ecrm.config import Config

SIZE = "OMPI_COMM_WORLD_SIZE"
FAULT_TOLERANT = "OMPI_MCA_mpi_ft_enable"  # "1" under --with-ft ulfm
# a folder per mpirun and host; mpirun removes the folder with all content
JOB_FOLDER = "PMIX_SERVER_TMPDIR"
HOST = "ECRM_HOST"
"""Environment variable with the name of this rank's host, in place of the system's own name."""
LAUNCHERS = ("mpirun", "mpiexec", "prterun")


def preflight_ulfm(
    config: Config, arguments: str = "CONFIG", environ: Mapping[str, str] = os.environ
) -> None:
    """Raise UsageError unless this process is one of config.world_size ranks under ULFM.

    The message gives the command to type; `arguments` are the words after `ecrm train`, as typed.
    """
    needed = config.world_size
    root = " --allow-run-as-root" if os.geteuid() == 0 else ""
    typed = f"mpirun --with-ft ulfm --oversubscribe{root} -n {needed} ecrm train {arguments}"
    needs = f"this config needs {counted(needed, 'rank')} ({config.ranks_in_words})"
    if SIZE not in environ:
        if needed > 1:
            raise UsageError(
                f"{needs}, and was started without mpirun: type ecrm launch {arguments}, or {typed}"
            )
        return
    if environ.get(FAULT_TOLERANT) not in ("1", "true") or not _launched_with_ft():
        raise UsageError(f"mpirun was started without fault tolerance: type {typed}")
    if int(environ[SIZE]) != needed:
        raise UsageError(f"{needs}, mpirun started {environ[SIZE]}: type {typed}")


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """The name of this rank's host."""
    return environ.get(HOST) or socket.gethostname()


def say_once(message: str, environ: Mapping[str, str] = os.environ, about: str = "") -> None:
    """Print `message` to stderr, once on this host for all ranks of one mpirun.

    All messages with the same `about`, if given, count as the same message.
    """
    folder = environ.get(JOB_FOLDER)
    if folder is not None and SIZE in environ:
        digest = hashlib.sha256((about or message).encode()).hexdigest()[:16]
        try:
            os.close(
                os.open(
                    Path(folder) / f"ecrm-said-{digest}",
                    os.O_CREAT | os.O_EXCL | os.O_WRONLY,
                    0o600,
                )
            )
        except FileExistsError:
            # mpirun may end the job when this rank leaves: let the first rank finish the line
            time.sleep(0.2)
            return
        except OSError:
            pass  # better twice than never
    print(message, file=sys.stderr, flush=True)


def _launched_with_ft() -> bool:
    """False if a launcher among this process's ancestors was started without --with-ft.

    A user can set MPI's own variable by hand. MPI then believes in fault tolerance while mpirun
    still ends the whole job at the first death (tried on 5.0.11).
    """
    pid = os.getppid()
    while pid > 1:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        if Path(words[0]).name in LAUNCHERS:
            return any(word.split("=")[0] == "--with-ft" for word in words)
        pid = int(stat.rpartition(")")[2].split()[1])
    return True  # started by a daemon on another host than mpirun's

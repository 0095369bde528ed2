"""What keeps a rank going, for the time that it takes to stop, when mpirun goes before it.

mpirun 5.0.11 that gets SIGTERM or SIGINT is gone after 0.5 s. A rank's PMIx library then finds its
connection closed and ends the process about a second later, its output goes nowhere, and nobody
removes the shared memory of MPI.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from ecrm.process.linux import shared_segments

_SERVER = "PMIX_SERVER_URI"


def keep_connection(environ: Mapping[str, str] = os.environ) -> None:
    """Put a socket that nobody closes in the place of those to the PMIx server.

    No message comes any more, nor the end of the connection. Deaths are no longer told to this
    rank. The kernel tells nobody who waits for the old socket that it has gone.
    """
    servers = {_address(uri) for name, uri in environ.items() if name.startswith(_SERVER)}
    for descriptor in _connected_to(servers):
        silent = socket.socketpair()
        silent[0].setblocking(False)  # as PMIx has its own: it reads until nothing is there
        os.dup2(silent[0].fileno(), descriptor)
        silent[1].detach()  # never closed


def speak_for(mpirun: int) -> None:
    """Print from now on where mpirun prints its errors, if that can be opened."""
    with contextlib.suppress(OSError):
        its = os.open(f"/proc/{mpirun}/fd/2", os.O_WRONLY | os.O_APPEND)
        os.dup2(its, 1)
        os.dup2(its, 2)


def leave_no_memory() -> None:
    """Unlink the shared memory that Open MPI has mapped here.

    Other processes that have it mapped keep it.
    """
    for segment in shared_segments(os.getpid()):
        with contextlib.suppress(OSError):
            os.unlink(segment)


def parent_of(pid: int) -> int:
    """The process that started a process; raises OSError if that is not there."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _address(uri: str) -> tuple[str, int]:
    """Host and port of `NAME;tcp4://HOST:PORT`."""
    host, _, port = uri.rpartition("//")[2].rpartition(":")
    return host, int(port) if port.isdecimal() else 0


def _connected_to(servers: set[tuple[str, int]]) -> Iterator[int]:
    """This process's sockets whose other end is one of these."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.getpeername()[:2] in servers:
                    yield int(name)

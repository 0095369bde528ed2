"""Keep a rank going until it has stopped, when mpirun goes first.

mpirun 5.0.11 is gone 0.5 s after SIGTERM or SIGINT. A rank's PMIx library then finds its connection
closed and ends the process about a second later, the rank's output goes nowhere, and no process
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
    """Replace the sockets to the PMIx server by sockets that are never closed.

    No message comes any more, nor the end of the connection. This rank gets no more news of deaths.
    The kernel does not wake waiters on the old socket.
    """
    servers = {_address(uri) for name, uri in environ.items() if name.startswith(_SERVER)}
    for descriptor in _connected_to(servers):
        silent = socket.socketpair()
        silent[0].setblocking(False)  # like PMIx's own sockets, which PMIx reads until empty
        os.dup2(silent[0].fileno(), descriptor)
        silent[1].detach()  # never closed


def speak_for(mpirun: int) -> None:
    """Print from now on to mpirun's stderr, if mpirun's stderr can be opened."""
    with contextlib.suppress(OSError):
        its = os.open(f"/proc/{mpirun}/fd/2", os.O_WRONLY | os.O_APPEND)
        os.dup2(its, 1)
        os.dup2(its, 2)


def leave_no_memory() -> None:
    """Unlink the shared memory mapped here by Open MPI.

    Other processes with a mapping keep the memory.
    """
    for segment in shared_segments(os.getpid()):
        with contextlib.suppress(OSError):
            os.unlink(segment)


def parent_of(pid: int) -> int:
    """The parent of a process; raises OSError for a missing process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _address(uri: str) -> tuple[str, int]:
    """Host and port of `NAME;tcp4://HOST:PORT`."""
    host, _, port = uri.rpartition("//")[2].rpartition(":")
    return host, int(port) if port.isdecimal() else 0


def _connected_to(servers: set[tuple[str, int]]) -> Iterator[int]:
    """The sockets of this process connected to `servers`."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.getpeername()[:2] in servers:
                    yield int(name)

"""A rank on another host: its client, as mpirun starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

KEEP_ALIVE = 1.0
NO_SHELL, SHELL = "env X={host}", "sh -c {command} {host}"


@contextmanager
def starting_clients(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts a client as mpirun would, by default rank 1 of 2; rank 0 is on another host."""
    hosts = tmp_path / "hosts"
    hosts.write_text("here\nthere slots=100\n")
    clients = []

    def start(
        *command: str,
        starter: str = NO_SHELL,
        keep_alive: float = KEEP_ALIVE,
        head: str = "127.0.0.1",
        constant: str = "pass",
        **variables: str,
    ) -> subprocess.Popen:
        program = (
            f"import sys, ecrm.launch.remote_rank as reach; {constant}; reach.main(sys.argv[1:])"
        )
        line = [sys.executable, "-c", program, "--hosts", str(hosts), "--head", head]
        line += ["--keep-alive", str(keep_alive), "--starter", starter, "--", *command]
        environ = {**os.environ, "PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", **variables}
        clients.append(
            subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environ,
            )
        )
        return clients[-1]

    yield start
    for client in clients:
        client.kill()
        client.communicate(timeout=20)

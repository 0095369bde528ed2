"""Ranks on another host: the process that watches them, as `ecrm launch --hosts` starts it."""

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
def starting_runs(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts the ranks of one command on one host; by default this is one rank."""
    hosts = tmp_path / "hosts"
    hosts.write_text("there slots=100\n")
    runs = []

    def start(
        *command: str,
        ranks: int = 1,
        starter: str = NO_SHELL,
        keep_alive: float = KEEP_ALIVE,
        head: str = "127.0.0.1",
        constant: str = "pass",
        begun: Path | None = None,
        **variables: str,
    ) -> subprocess.Popen:
        program = (
            "import sys, ecrm.launch.remote_run as run, ecrm.launch.remote_host as reach; "
            f"{constant}; run.main(sys.argv[1:])"
        )
        line = [sys.executable, "-c", program, "--hosts", str(hosts), "--head", head]
        line += ["--ranks", str(ranks), "--keep-alive", str(keep_alive), "--starter", starter]
        line += ["--begun", str(begun)] if begun is not None else []
        runs.append(
            subprocess.Popen(
                [*line, "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **variables},
            )
        )
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
        run.communicate(timeout=20)

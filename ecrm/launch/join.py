"""Processes that join a run in the place of the lost ranks of a host, and their watch."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
from pathlib import Path

from ecrm.base.errors import UsageError
from ecrm.base.wording import named
from ecrm.process.linux import when_parent_ends
from ecrm.run.joining import JoinFile
from ecrm.run.reading import read_json
from ecrm.transport.membership_socket import Rendezvous, encoded

REPEATS = 3
"""Datagrams about a death."""


def join(run_dir: Path, host: str, place: str | None = None) -> int:
    """Be the lost ranks of `place`, by default of `host`, on this machine; return the exit code.

    Returns once the processes have ended: 0 if all have finished the run. Raises UsageError if no
    rank of the host is lost.
    """
    file = JoinFile.read(run_dir)
    ranks = _lost(run_dir, file, host if place is None else place)
    print(f"{named('rank', ranks)} of {run_dir} on host {host}: joining", flush=True)
    began = {rank: _begin(file, rank, host, run_dir) for rank in ranks}
    codes = [_watched(file, rank, life, process) for rank, (life, process) in began.items()]
    return max(code if code >= 0 else 1 for code in codes)


def _lost(run_dir: Path, file: JoinFile, place: str) -> list[int]:
    """The lost ranks of a host of the run."""
    here = [rank for rank, host in enumerate(file.hosts) if host == place]
    if not here:
        raise UsageError(
            f"--host {place}: no host of the run, whose hosts are "
            f"{', '.join(dict.fromkeys(file.hosts))}",
            otherwise=f"name the lost host that this host replaces: --place {file.hosts[0]}",
        )
    said = read_json(run_dir / "ranks.json").get("ranks", [])
    lost = [each["rank"] for each in said if each["rank"] in here and not each["live"]]
    if not lost:
        raise UsageError(
            f"host {place}: its {named('rank', here)} live, and none can be replaced",
            otherwise=f"see ecrm status {run_dir}",
        )
    return lost


def _begin(
    file: JoinFile, rank: int, host: str, run_dir: Path
) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a process that wants to be a rank; returns its life, and the process."""
    life = secrets.token_hex(8)
    process = subprocess.Popen(
        file.command,
        cwd=file.folder,
        env={**os.environ, **file.environment(rank, life, host, run_dir.absolute())},
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: when_parent_ends(signal.SIGKILL),
    )
    return life, process


def _watched(file: JoinFile, rank: int, life: str, process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process; tells the head of a death."""
    code = process.wait()
    if code != 0:
        there = Rendezvous.of_text(file.links)
        gone = {"is": "gone", "rank": rank, "life": life}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as told:
            for _ in range(REPEATS):  # a datagram may be lost, and the lease tells otherwise
                told.sendto(encoded(there.run, there.secret, gone), there.head)
    return code

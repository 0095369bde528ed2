"""Processes that join a run in the place of the lost ranks of a host, with an agent of their own.

The agent (`ecrm.process.remote_agent`) is the same as for the ranks of the start: it has their
output, kills what they leave behind, and kills the ranks when this process is gone. The ranks end
by themselves when the head of the run is gone: their leases are over.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from ecrm.base.errors import UsageError
from ecrm.base.wording import named
from ecrm.launch.hosts_file import Host
from ecrm.launch.remote_host import RemoteHost
from ecrm.launch.remote_run import HeadWord, RemoteRun, StartMark, meeting_at
from ecrm.launch.supervise import has_ended
from ecrm.run.joining import JoinFile, why_closed
from ecrm.run.reading import LAUNCH, read_own
from ecrm.transport.membership_socket import Rendezvous

HERE = "127.0.0.1"
STARTER = "sh -c 'ECRM_HOST={host} {command}; exit $?'"
"""The starter of the agent: this machine is the host.

The shell dies with this process; the agent lives on, hears nothing, and kills all it has started.
"""


def join(run_dir: Path, host: str, place: str | None = None) -> int:
    """Be the lost ranks of `place`, by default of `host`, on this machine; return the exit code.

    Returns once the processes have ended: 0 if all have finished the run. Raises UsageError if no
    rank of the host is lost.
    """
    run_dir = run_dir.absolute()
    file = JoinFile.read(run_dir)
    ranks = _lost(run_dir, file, host if place is None else place)
    try:
        os.chdir(file.folder)
    except OSError as error:
        raise UsageError(
            f"the folder of the launch, {file.folder}: {error.strerror}",
            otherwise="let this host have the folders that the other hosts have",
        ) from None
    print(f"{named('rank', ranks)} of {run_dir} on host {host}: joining", flush=True)
    lives = {rank: secrets.token_hex(8) for rank in ranks}
    variables = {rank: file.environment(rank, lives[rank], host, run_dir) for rank in ranks}
    meeting, keep_alive = meeting_at(HERE), Rendezvous.of_text(file.links).keep_alive
    agent = RemoteHost(
        0,
        Host(host, len(ranks), host),
        variables,
        file.command,
        meeting.getsockname(),
        keep_alive,
        STARTER,
    )
    word = HeadWord(file.links, lives)
    return RemoteRun([agent], meeting, StartMark(None), word, joining=True).run(keep_alive)


def _lost(run_dir: Path, file: JoinFile, place: str) -> list[int]:
    """The lost ranks of a host of the run."""
    here = [rank for rank, host in enumerate(file.hosts) if host == place]
    if not here:
        raise UsageError(
            f"--host {place}: no host of the run, whose hosts are "
            f"{', '.join(dict.fromkeys(file.hosts))}",
            otherwise=f"name the lost host that this host replaces: --place {file.hosts[0]}",
        )
    launched = file.variables.get(LAUNCH)
    if has_ended(run_dir, launched):
        raise UsageError(f"{run_dir}: the run has ended", otherwise=f"see ecrm report {run_dir}")
    if why := why_closed(run_dir):
        raise UsageError(
            f"{run_dir}: {why}",
            otherwise=f"leave the host out: see ecrm status {run_dir} for what the run can lose",
        )
    said = read_own(run_dir / "ranks.json", launched).get("ranks", [])
    lost = [each["rank"] for each in said if each["rank"] in here and not each["live"]]
    if not lost:
        raise UsageError(
            f"host {place}: its {named('rank', here)} live, and none can be replaced",
            otherwise=f"see ecrm status {run_dir}",
        )
    return lost

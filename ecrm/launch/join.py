"""Processes that join a run in the place of the lost ranks of a host, with an agent of their own.

The agent (`ecrm.process.remote_agent`) is the same as for the ranks of the start: it has their
output, kills what they leave behind, and kills the ranks when this process is gone. The ranks end
by themselves when the head of the run is gone: their leases are over.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

from ecrm.base.errors import UsageError
from ecrm.base.wording import named
from ecrm.launch.hosts_file import NAME, Host
from ecrm.launch.remote_host import RemoteHost, starter_words
from ecrm.launch.remote_run import HeadWord, RemoteRun, StartMark, meeting_at
from ecrm.run.joining import JoinFile, why_closed
from ecrm.run.reading import LAUNCH, read_own
from ecrm.run.session_folders import has_ended
from ecrm.transport.membership_socket import Rendezvous

HERE = "127.0.0.1"
STARTER = "sh -c 'ECRM_HOST={host} {command}; exit $?'"
"""The starter of the agent: this machine is the host.

The shell dies with this process; the agent lives on, hears nothing, and kills all it has started.
"""


def join(run_dir: Path, host: str, place: str | None = None, here: bool = False) -> int:
    """Be the lost ranks of `place`, by default of `host`, on this machine; return the exit code.

    On the head machine the ranks start on `host`, reached by the launch's starter. `here`: this
    machine is the host, whatever its address. Returns once the processes have ended: 0 if all have
    finished the run. Raises UsageError if no rank of the host is lost, and on other machines.
    """
    if not NAME.fullmatch(host):
        raise UsageError(f"--host {host!r}: not a host's name", otherwise="name a host as ssh does")
    run_dir = run_dir.absolute()
    file = JoinFile.read(run_dir)
    ranks = _lost(run_dir, file, host, host if place is None else place)
    try:
        os.chdir(file.folder)
    except OSError as error:
        raise UsageError(
            f"the folder of the launch, {file.folder}: {error.strerror}",
            otherwise="let this host have the folders that the other hosts have",
        ) from None
    if not here and not _is_here(file, host):
        there = Host(host, len(ranks), file.addresses.get(host, host))
        print(f"host {host}: ecrm join is started there", flush=True)
        words = starter_words(file.starter, there, join_words(run_dir, host, place))
        try:
            return subprocess.call(words, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise UsageError(f"cannot run the starter {words[0]}: {error.strerror}") from None
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


def join_words(run_dir: Path, host: str, place: str | None = None) -> list[str]:
    """The words of `ecrm join` for the machine that is the host."""
    of = [] if place is None else ["--place", place]
    return [sys.executable, "-m", "ecrm", "join", str(run_dir), "--host", host, *of, "--here"]


def _is_here(file: JoinFile, host: str) -> bool:
    """Whether this machine is the host; False on the head machine, if the host is elsewhere.

    A host of no known address is on the far side of the launch's starter, if typed on the head
    machine, and here otherwise. Raises UsageError on any other machine.
    """
    address = file.addresses.get(host, host)
    mine = _is_local(address)
    is_head = _is_local(Rendezvous.of_text(file.links).head[0]) is True
    if is_head and file.starter and not mine:
        return False
    for name, other in file.addresses.items():
        if other != address and _is_local(other):
            raise UsageError(
                f"--host {host}: this machine is host {name} of the run",
                otherwise=f"type this on host {host} or on the head machine, or add --here if "
                f"this machine is host {host}",
            )
    if mine is False:
        raise UsageError(
            f"--host {host}: {address} is no address of this machine",
            otherwise=f"type this on host {host} or on the head machine, or add --here if this "
            f"machine is host {host}",
        )
    return True


def _is_local(address: str) -> bool | None:
    """Whether an address is of this machine; `None` if the address is not known here."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((address, 0))
        except socket.gaierror:
            return None
        except OSError:
            return False
    return True


def _lost(run_dir: Path, file: JoinFile, host: str, place: str) -> list[int]:
    """The lost ranks of a `place`, for a `host` of that name or without ranks."""
    launched = file.variables.get(LAUNCH)
    said = read_own(run_dir / "ranks.json", launched).get("ranks", [])
    now = {each["rank"]: each.get("host") for each in said}
    here = [rank for rank, first in enumerate(file.hosts) if place in (first, now.get(rank))]
    if not here:
        raise UsageError(
            f"--host {place}: no host of the run, whose hosts are "
            f"{', '.join(dict.fromkeys(file.hosts))}",
            otherwise=f"name the lost host that this host replaces: --place {file.hosts[0]}",
        )
    if has_ended(run_dir, launched):
        raise UsageError(f"{run_dir}: the run has ended", otherwise=f"see ecrm report {run_dir}")
    if why := why_closed(run_dir, launched):
        raise UsageError(
            f"{run_dir}: {why}",
            otherwise=f"leave the host out: see ecrm status {run_dir} for what the run can lose",
        )
    others = [each["rank"] for each in said if each["live"] and now[each["rank"]] == host]
    if host != place and others:
        raise UsageError(
            f"--host {host}: its {named('rank', others)} live, and the loss of the host would "
            "count twice",
            otherwise="name a host without ranks of the run",
        )
    lost = [each["rank"] for each in said if each["rank"] in here and not each["live"]]
    if not lost:
        raise UsageError(
            f"host {place}: its {named('rank', here)} live, and none can be replaced",
            otherwise=f"see ecrm status {run_dir}",
        )
    return lost

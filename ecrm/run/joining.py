"""The start of a run as told to processes that join the run later.

A rank that joins makes the same calls at its start as the ranks have made, and gets the same
results: from a file in the run folder. Only then does the rank wait for an epoch.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecrm.base.console import say
from ecrm.base.errors import UsageError
from ecrm.process.neighbours import RANK
from ecrm.process.preflight import FAULT_TOLERANT, SIZE, host_name
from ecrm.process.remote_agent import BEATS_TO, GUARD_PATIENCE
from ecrm.run.reading import launch_id, read_json
from ecrm.run.run_lock import JOIN
from ecrm.run.session_folders import has_ended, session_folder
from ecrm.transport.membership_socket import LINKS, Rendezvous

if TYPE_CHECKING:
    from ecrm.transport.base import Transport
    from ecrm.transport.links import LinkTransport

FILE = JOIN
"""The file in a run folder; it has the secret of the run, and only the owner can read it."""
LIFE = "ECRM_LIFE"
"""The variable with the life of a process that joins, and the run folder behind a blank."""
REACHED_BY = "ECRM_REACHED_BY"
"""The variable with the launch's starter, and the address of each host by name, as JSON."""
KEPT = ("ECRM_", "OMP_", "MKL_", "OPENBLAS_", "PYTHONHASHSEED")
"""Prefixes of the variables handed on to a process that joins."""


def _is_there(path: Path) -> bool:
    """Whether a file is there, or may be: the folder of another user shows no files."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


@dataclass(frozen=True)
class JoinFile:
    """How to join a run: `hosts` and results of the start, the command and its variables.

    `said` are the results of `gather_results` at the start, by rank, and `rounds` is the number of
    collective calls at the start. `links` is the rendezvous. `variables` include REACHED_BY.
    """

    links: str
    hosts: list[str]
    folder: str
    command: list[str]
    variables: Mapping[str, str]
    said: list[dict[str, Any]]
    rounds: int = 0

    @staticmethod
    def read(run_dir: Path) -> JoinFile:
        """The file of a run. Raises UsageError without a file, and for one of another version."""
        path = run_dir / FILE
        fields = read_json(path)
        if not fields and _is_there(path):
            raise UsageError(
                f"{path} cannot be read", otherwise="type ecrm join as the user of the launch"
            )
        if not fields:
            raise UsageError(
                f"{run_dir}: no run over several hosts that ranks can join",
                otherwise="name the run folder of an `ecrm launch --hosts` that is training",
            )
        try:
            return JoinFile(**fields)
        except TypeError:
            raise UsageError(
                f"{path} is of another version of ecrm",
                otherwise="install the version of the run on this host, and join again",
            ) from None

    @property
    def starter(self) -> str:
        """The command to reach a host, "" if not known."""
        return self._reached_by[0]

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses in the hosts file, by name."""
        return self._reached_by[1]

    @property
    def _reached_by(self) -> tuple[str, dict[str, str]]:
        starter, addresses = json.loads(self.variables.get(REACHED_BY, '["", {}]'))
        return starter, addresses

    def environment(self, rank: int, life: str, host: str, run_dir: Path) -> dict[str, str]:
        """The variables of a process that wants to be `rank`, on top of those of its host."""
        return {
            **self.variables,
            LINKS: self.links,
            LIFE: f"{life} {run_dir}",
            RANK: str(rank),
            SIZE: str(len(self.hosts)),
            FAULT_TOLERANT: "1",
            "ECRM_HOST": host,
        }


_rendezvous: list[str] = []


def over_links() -> bool:
    """Whether this rank talks by links, so that lost ranks may come back."""
    return bool(_rendezvous)


def why_closed(run_dir: Path, launch: str | None) -> str:
    """Why no rank can join the run of a launch any more, as a sentence; "" if ranks can.

    A process that joins runs the script from its begin, and cannot know how a session has ended.
    """
    if has_ended(run_dir, launch):
        return "the run has ended"
    if session_folder(run_dir, 2).is_dir():
        return "a second session of the script has begun, and admits no rank"
    return ""


def link_transport(text: str, life: str) -> LinkTransport:
    """The links of this process; `life` is the value of LIFE, "" for a rank of the start."""
    from ecrm.transport.links import LinkTransport

    _rendezvous[:] = [text]
    rendezvous = Rendezvous.of_text(text)
    rank, ranks = (int(os.environ[name]) for name in (RANK, SIZE))
    address, colon, port = os.environ.pop(BEATS_TO, "").partition(":")
    beats_to = (address, int(port)) if colon else None
    if not life:
        return LinkTransport(rank, ranks, rendezvous, beats_to=beats_to)
    name, _, run_dir = life.partition(" ")
    transport = LinkTransport(rank, ranks, rendezvous, name, host_name(), beats_to)
    transport.live = tuple(range(ranks))  # as at the start, until `enter`
    file = JoinFile.read(Path(run_dir))
    transport.rounds_at_start = file.rounds
    transport.said_at_start = tuple(
        {int(of): value for of, value in said.items()} for said in file.said
    )
    transport.why_closed = partial(why_closed, Path(run_dir), launch_id())
    return transport


def write_join_file(run_dir: Path | None, transport: Transport, hosts: list[str]) -> None:
    """Write the file for processes that join; a run on one host removes the file of a run before.

    `hosts` has the host of each rank. A line tells of an error of the system: no rank joins then.
    """
    if run_dir is None:
        return
    if not _rendezvous:
        with contextlib.suppress(OSError):
            (run_dir / FILE).unlink(missing_ok=True)
        return
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(KEPT) and name not in (GUARD_PATIENCE, "ECRM_HOST")
    }
    said = [{str(of): value for of, value in each.items()} for each in transport.said_at_start]
    rounds, here = transport.rounds_at_start, os.getcwd()
    file = JoinFile(_rendezvous[0], hosts, here, sys.orig_argv, variables, said, rounds)
    draft = run_dir / f"{FILE}.{os.getpid()}"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as out:
            json.dump(asdict(file), out)
        os.replace(draft, run_dir / FILE)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        say(
            f"ecrm: warning: cannot write {run_dir / FILE}: {error.strerror}: lost hosts cannot "
            "come back",
            on_stderr=True,
        )

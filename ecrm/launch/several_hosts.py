"""Additions of a launch over several hosts to a launch on this machine.

The additions are checks, words before each rank's command, and a trial of every host.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ecrm.base.errors import UsageError
from ecrm.launch.hosts_file import Host, place, placement_in_words, read_hosts
from ecrm.launch.network import Network, choose_network, local_networks
from ecrm.launch.remote_host import DEFAULT_KEEP_ALIVE, DEFAULT_STARTER, starter_words
from ecrm.launch.run_head import run_head
from ecrm.process.remote_agent import START_SECONDS
from ecrm.run.joining import REACHED_BY

SHORTEST_KEEP_ALIVE = 0.5
MOST_RANKS = 1800
TRIAL = "import ecrm, numpy"  # not torch: it takes seconds, and is where numpy is


@dataclass(frozen=True)
class RemoteHosts:
    """The hosts of a run as given by the user.

    `file` is the hosts file, `starter` the command to reach a host, `interface` this machine's
    interface to the hosts, and `keep_alive` is in seconds.
    """

    file: Path
    starter: str = DEFAULT_STARTER
    interface: str | None = None
    keep_alive: float = DEFAULT_KEEP_ALIVE

    def plan(self, ranks: int) -> Plan:
        """Plan the run, with all checks possible without reaching a host; raises UsageError."""
        placed = place(read_hosts(self.file), ranks, self.file)
        if ranks > MOST_RANKS:
            raise UsageError(
                f"{ranks} ranks over hosts: the places of all ranks fit one datagram up to "
                f"{MOST_RANKS} ranks",
                otherwise=f"start at most {MOST_RANKS} ranks",
            )
        if not SHORTEST_KEEP_ALIVE <= self.keep_alive <= 3600:
            raise UsageError(
                f"--keep-alive {self.keep_alive:g}: type seconds from {SHORTEST_KEEP_ALIVE} to 3600"
            )
        starter_words(self.starter, placed[0], [])
        network = choose_network(self.interface, dict.fromkeys(placed), local_networks())
        words = [
            sys.executable,
            "-m",
            "ecrm.launch.remote_run",
            "--hosts",
            str(self.file.absolute()),
            "--ranks",
            str(ranks),
            "--head",
            network.address,
        ]
        words += ["--keep-alive", f"{self.keep_alive:g}", "--starter", self.starter]
        return Plan(tuple(placed), network, tuple(words), self.keep_alive, self.starter)


@dataclass(frozen=True)
class Plan:
    """The host of each rank, the network between hosts, and the way to a host.

    `placed` is the host of each rank; `words` run the program taking ranks to their hosts;
    `keep_alive` is in seconds; `starter` is the command to reach a host.
    """

    placed: tuple[Host, ...]
    network: Network
    words: tuple[str, ...]
    keep_alive: float
    starter: str

    def command(self, command: Sequence[str], run_dir: Path) -> list[str]:
        """The words running the command of each rank on the rank's host.

        `run_dir` shows whether the run has begun.
        """
        return [*self.words, "--begun", str(run_dir / "ranks.json"), "--", *command]

    def reached_by(self) -> dict[str, str]:
        """The variable that tells `ecrm join` how to reach the hosts."""
        addresses = {host.name: host.address for host in self.placed}
        return {REACHED_BY: json.dumps([self.starter, addresses])}

    def in_words(self) -> list[str]:
        """The ranks of each host, one line a host."""
        return placement_in_words(self.placed)

    def head(self) -> AbstractContextManager[dict[str, str]]:
        """The head of the run, with the variables for the ranks; raises EcrmError."""
        return run_head([host.name for host in self.placed], self.network.address, self.keep_alive)

    def try_hosts(self) -> None:
        """Run a small program on every host, in the way of a rank.

        Raises UsageError with the first reason against a host.
        """
        trials: dict[Host, subprocess.Popen[str]] = {}
        for host in dict.fromkeys(self.placed):
            trials[host] = subprocess.Popen(
                [*self.words, "--only", host.name, "--", sys.executable, "-c", TRIAL],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        try:
            for host, trial in trials.items():
                try:
                    said = trial.communicate(timeout=2 * START_SECONDS)[1]
                except subprocess.TimeoutExpired:
                    raise UsageError(
                        f"host {host.name}: no answer within {2 * START_SECONDS:.0f} s"
                    ) from None
                if trial.returncode != 0:
                    raise UsageError(f"host {host.name} cannot be used: {_reason(said)}")
        finally:
            for trial in trials.values():
                _end(trial)


def _end(trial: subprocess.Popen[str]) -> None:
    """SIGKILL a trial and collect its process.

    Does not wait for a starter of another user, as under sudo, still holding the trial's output.
    """
    trial.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        trial.wait(1.0)
    if trial.stderr is not None:
        trial.stderr.close()


def _reason(said: str) -> str:
    """The reason of a failed trial, in one line: the last two lines printed, if different."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines[-2:])) or "no reason was given"

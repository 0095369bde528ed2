"""A host of a run as the head machine sees it: its starter, its agent, and its ranks.

The starter (ssh, or a different command able to run a command on the host) starts an agent on the
host. The agent starts the host's ranks, and the talk with the agent tells how each rank ends
(`ecrm.process.remote_agent`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ecrm.base.errors import UsageError
from ecrm.launch.hosts_file import Host
from ecrm.launch.mpirun_command import HASH_SEED
from ecrm.process import remote_agent
from ecrm.process.linux import when_parent_ends
from ecrm.process.preflight import HOST
from ecrm.process.remote_agent import START_SECONDS, Lost, Talk, told, understood
from ecrm.transport.membership_socket import LINKS

DEFAULT_KEEP_ALIVE = 2.0
DEFAULT_STARTER = (
    "ssh -T -o BatchMode=yes -o ControlPath=none -o ConnectTimeout=10 "
    "-o ServerAliveInterval=2 -o ServerAliveCountMax=3 {address} {command}"
)
FIELDS = ("{host}", "{address}", "{command}")
# Prefixes of the variables of this process needed by a rank on another host.
HANDED_ON = ("ECRM_", "OMP_", "MKL_", "OPENBLAS_", HASH_SEED)
SSH_FAILED = 255  # the exit code of ssh itself, above all of a connection dropped by sshd
DROPPED_SECONDS = 5.0  # after a longer time a different failure is the cause
PAUSES = (0.5, 1.0, 2.0, 4.0)  # before a restart of the starter, at random down to half


def starter_words(template: str, host: Host, command: Sequence[str]) -> list[str]:
    """The words running `command` on `host`, from the template of a starter.

    {host} and {address} stand for name and address of the host; {command} for the command quoted
    for a shell, as needed by ssh. A template without {command} gets the words of the command behind
    the template, for starters without a shell.
    """
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise UsageError(f"--starter {template!r}: {error}") from None
    if not words:
        raise UsageError("--starter is empty: type a command such as 'ip netns exec {host}'")
    if not any(field in template for field in FIELDS[:2]):
        raise UsageError(
            f"--starter {template!r}: names neither {{host}} nor {{address}}, "
            "so all ranks would be on one"
        )
    values = (host.name, host.address, shlex.join(command))
    filled = []
    for word in words:
        for field, value in zip(FIELDS, values):
            word = word.replace(field, value)
        filled.append(word)
    return filled if FIELDS[2] in template else [*filled, *command]


def _without_secret() -> dict[str, str]:
    """This process's variables for a starter: srun hands all variables on, in sight of others."""
    return {name: value for name, value in os.environ.items() if name != LINKS}


def handed_on(environ: Mapping[str, str], host: Host) -> dict[str, str]:
    """The variables given to a rank on `host`, on top of the variables of the host itself."""
    return {
        **{name: value for name, value in environ.items() if name.startswith(HANDED_ON)},
        HOST: host.name,
    }


class RemoteHost:
    """The ranks on a host. `look`, `hear` and `due` make progress; all waits are the caller's."""

    def __init__(
        self,
        number: int,
        host: Host,
        ranks: Mapping[int, Mapping[str, str]],
        command: Sequence[str],
        head: tuple[str, int],
        keep_alive: float,
        starter: str,
    ) -> None:
        """Prepare to start `ranks`, each with its variables; the head listens at `head`."""
        self.host, self.number = host, number
        secret = secrets.token_bytes(32)
        self._order = {
            "host": host.name,
            "number": number,
            "head": head,
            "secret": secret.hex(),
            "keep_alive": keep_alive,
            "folder": os.getcwd(),
            "command": list(command),
            "variables": handed_on(os.environ, host),
            "ranks": [(rank, dict(variables)) for rank, variables in ranks.items()],
        }
        self._words = starter_words(
            starter, host, [sys.executable, "-I", "-S", str(Path(remote_agent.__file__).resolve())]
        )
        self._talk = Talk(secret, "head", number, keep_alive)
        self._process: subprocess.Popen[bytes] | None = None
        self._pauses, self._tries = iter(PAUSES), 1
        self._deadline: float | None = None
        self._started, self._start_at = 0.0, 0.0
        self.address: Any = None
        """Where the agent is, once it has been heard."""
        self._ranks, self.running = frozenset(ranks), set(ranks)
        """The ranks whose end is not known."""

    @property
    def has_met(self) -> bool:
        """Whether the agent has been heard."""
        return self._talk.met

    @property
    def must_start(self) -> bool:
        """Whether the starter is to be started now, for the first time or again."""
        return self._process is None and not self._talk.met and time.monotonic() >= self._start_at

    def look(self) -> str | None:
        """Look for trouble; return a line to tell, if any.

        Raises Lost if the host must be given up.
        """
        if self._talk.met:
            if self.running:
                self._talk.check()
            return None
        now = time.monotonic()
        if self._deadline is not None and now > self._deadline:
            raise Lost(f"no answer within {START_SECONDS:.0f} s from: {shlex.join(self._words)}")
        if self._process is None or (code := self._process.poll()) is None:
            return None
        dropped = code == SSH_FAILED and now - self._started < DROPPED_SECONDS
        pause = next(self._pauses, None) if dropped else None
        if pause is None:
            raise Lost(f"the starter ended with {code}: {shlex.join(self._words)}")
        self._tries += 1
        self._process, self._start_at = None, now + pause * random.uniform(0.5, 1.0)
        return (
            f"host {self.host.name}: the starter ended with {code}, "
            f"trying again ({self._tries} of {1 + len(PAUSES)})"
        )

    def hear(
        self, datagram: bytes, sender: Any, take: bool
    ) -> list[tuple[int, int, bytes] | dict[str, Any]] | None:
        """The messages of the agent that are complete; `None` for a stranger's datagram.

        Without `take` a message in the datagram stays with the agent, which says it again. Raises
        Lost for bytes that are no message.
        """
        messages = self._talk.hear(datagram, take)
        if messages is None:
            return None
        self.address = sender
        return [said for message in messages if (said := self._checked(message)) is not None]

    def due(self) -> list[bytes]:
        """The datagrams to send to the agent now."""
        return self._talk.due()

    def say(self, **fields: Any) -> None:
        """Have the agent hear a message."""
        self._talk.send(told(**fields))

    def leave(self, seconds: float) -> None:
        """Give the starter `seconds` to end, then kill the starter."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            if self._process.poll() is None:
                # a starter of another user, as under sudo: ends with its connection
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _checked(self, message: bytes) -> tuple[int, int, bytes] | dict[str, Any] | None:
        """A message of the agent: output, or the end of a rank; `None` for an end known before."""
        said = understood(message)
        if isinstance(said, tuple):
            return said
        rank = said.get("rank")
        how = said.get("error", said.get("exit", said.get("signal")))
        if rank not in self._ranks or not isinstance(how, str if "error" in said else int):
            raise Lost("what came is no message")
        if rank not in self.running:  # given up meanwhile
            return None
        self.running.remove(rank)
        return said

    def start(self) -> None:
        """Start the starter. Raises Lost."""
        # A file and not a pipe: a starter not reading its input holds up no process.
        with open(os.memfd_create("order"), "w+b") as order:
            order.write(json.dumps(self._order).encode() + b"\n")
            order.seek(0)
            try:
                # A separate process group: signals to the launch are for this process alone.
                self._process = subprocess.Popen(
                    self._words,
                    stdin=order,
                    env=_without_secret(),
                    process_group=0,
                    preexec_fn=lambda: when_parent_ends(signal.SIGKILL),
                )
            except OSError as error:
                raise Lost(f"cannot run the starter {self._words[0]}: {error.strerror}") from None
        self._started = time.monotonic()
        self._deadline = self._deadline or self._started + START_SECONDS

"""The head side of a rank on another host: the process that mpirun takes for the rank.

It starts an agent on the rank's host through a starter (ssh, or whatever gets a command there), and
the two keep a connection alive. When the rank dies, or its host is not heard any more, this process
SIGKILLs itself: that is the one ending of which mpirun tells everybody within milliseconds. Such
processes look after each other, too: one that stands stopped is killed by another, after the rank
has been killed by its agent, which hears nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hmac
import json
import os
import random
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ecrm.errors import EcrmError, UsageError
from ecrm.launch.hosts_file import Host, place, read_hosts
from ecrm.launch.network_cuts import Cuts
from ecrm.process import remote_agent
from ecrm.process.linux import when_parent_ends
from ecrm.process.neighbours import AwakeClock, Neighbours, Noticeboard
from ecrm.process.preflight import HOST, JOB_FOLDER
from ecrm.process.remote_agent import PATIENCE, START_SECONDS, Link, Lost
from ecrm.run.reading import launch_id, read_own

AT_ONCE = 4
"""Starters of a host that are under way at once, of sshd's ten (MaxStartups 10:30:100)."""

DEFAULT_KEEP_ALIVE = 2.0
DEFAULT_STARTER = (
    "ssh -T -o BatchMode=yes -o ControlPath=none -o ConnectTimeout=10 "
    "-o ServerAliveInterval=2 -o ServerAliveCountMax=3 {address} {command}"
)
FIELDS = ("{host}", "{address}", "{command}")
# What a rank elsewhere must have of this process's variables.
HANDED_ON = ("PMIX_", "OMPI_", "OPAL_", "PRTE_", "ECRM_", "OMP_", "MKL_", "OPENBLAS_")
Readable = TypeVar("Readable", bound=Link | socket.socket)
CLIENTS = "clients"
OUTPUT_SECONDS = 0.2  # for the last output of a rank that was killed
LEAVE_SECONDS = 5.0  # the same for one that ended by itself
SSH_FAILED = 255  # the exit code of ssh itself, above all of a connection that sshd dropped
DROPPED_SECONDS = 5.0  # after which it is something else that failed
PAUSES = (0.5, 1.0, 2.0, 4.0)  # before it is started again, at random down to half of that
_POLL_SECONDS = 0.5
_TURN_POLL_SECONDS = 0.02
_MOST_WAITING = 16  # connections that have not shown a token
_TOKEN_BYTES = 200  # more than the first line from an agent has


@contextlib.contextmanager
def turn(
    host: str, place: int, wait: Callable[[], None], environ: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Held while the rank that is number `place` of its host is started.

    At most AT_ONCE ranks of a host hold theirs. Calls `wait` between looks whether the turn has
    come. Without a folder of the job nobody waits.
    """
    folder = environ.get(JOB_FOLDER)
    if folder is None:
        yield
        return
    # A lock dies with its process, so a client that is killed holds up nobody.
    with open(Path(folder) / f"ecrm-start-{host}-{place % AT_ONCE}", "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                wait()
        yield


def starter_words(template: str, host: Host, command: Sequence[str]) -> list[str]:
    """The words that run `command` on `host`.

    {host} and {address} stand for the host's; {command} for the command quoted for a shell, which
    ssh needs. A template without {command} has the words of the command behind it, for what needs
    no shell.
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


def handed_on(environ: Mapping[str, str], host: Host) -> dict[str, str]:
    """The variables that a rank on `host` gets on top of those that it finds there."""
    return {
        **{name: value for name, value in environ.items() if name.startswith(HANDED_ON)},
        HOST: host.name,
    }


class Reach:
    """One rank on another host: `run` until it has ended, which gives its end or raises Lost."""

    def __init__(
        self,
        host: Host,
        place: int,
        head: str,
        keep_alive: float,
        starter: str,
        command: Sequence[str],
    ) -> None:
        """The rank is number `place` of those on `host`, from 0."""
        self._host, self._place, self._keep_alive = host, place, keep_alive
        self._token = secrets.token_hex(32)
        self._listener = socket.create_server((head, 0), backlog=16)
        self._listener.setblocking(False)
        self._order = {
            "host": host.name,
            "head": self._listener.getsockname(),
            "token": self._token,
            "keep_alive": keep_alive,
            "folder": os.getcwd(),
            "command": list(command),
            "variables": handed_on(os.environ, host),
        }
        self._words = starter_words(
            starter, host, [sys.executable, "-I", "-S", str(Path(remote_agent.__file__).resolve())]
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._parent = os.getppid()
        self._signals, writing = os.pipe()
        os.set_blocking(self._signals, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        for number in remote_agent.PASSED_ON:
            signal.signal(number, lambda *_: None)

    def run(self, cuts: Cuts, between: Callable[[], None]) -> dict[str, Any]:
        """Start the rank; returns how it ended, as its agent says.

        Calls `between` every now and then while it runs. A rank whose host is given up, as `cuts`
        tells, is killed. Raises Lost when the rank must be given up.
        """
        patience = START_SECONDS * (1 + self._place // AT_ONCE)
        deadline = time.monotonic() + patience

        def wait_for_turn() -> None:
            self._wait([], _TURN_POLL_SECONDS)
            self._heed_end()
            if time.monotonic() > deadline:
                raise Lost(f"its turn to be started did not come within {patience:.0f} s")

        with turn(self._host.name, self._place, wait_for_turn):
            link = self._connect()
        cuts.is_at(link.peer)
        while True:
            self._wait([link], link.beat())
            between()
            if cuts.given_up(link.heard):
                link.send(signal=signal.SIGKILL)
            for number in self._signalled():
                link.send(signal=number)
            for message in link.receive():
                if isinstance(message.get("unheard"), list):
                    cuts.unheard(message["unheard"])
                    continue
                if "error" in message:
                    raise Lost(f"cannot start the rank there: {message['error']}")
                if not isinstance(message.get("exit", message.get("signal")), int):
                    raise Lost("what came is no message")
                link.finish()
                return message

    def leave(self, seconds: float) -> None:
        """Give the starter so long to pass on the rank's last output, then end it."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            if self._process.poll() is None:
                # of another user, as under sudo: it ends with its connection
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self) -> None:
        # A file and not a pipe: nothing waits for a starter that does not read.
        with open(os.memfd_create("order"), "w+b") as order:
            order.write(json.dumps(self._order).encode() + b"\n")
            order.seek(0)
            try:
                # A process group of its own: mpirun's signals are for this process, which passes
                # them on.
                self._process = subprocess.Popen(
                    self._words,
                    stdin=order,
                    process_group=0,
                    preexec_fn=lambda: when_parent_ends(signal.SIGKILL),
                )
            except OSError as error:
                raise Lost(f"cannot run the starter {self._words[0]}: {error.strerror}") from None

    def _connect(self) -> Link:
        """Start the agent; its connection, known by its token. Others are sent away."""
        deadline = time.monotonic() + START_SECONDS
        pauses, tries, started = iter(PAUSES), 1, 0.0
        start_at: float | None = 0.0
        waiting: list[socket.socket] = []
        while time.monotonic() < deadline:
            if start_at is not None and time.monotonic() >= start_at:
                self._start()
                started, start_at = time.monotonic(), None
            for ready in self._wait([self._listener, *waiting], _POLL_SECONDS):
                if ready is self._listener:
                    with contextlib.suppress(OSError):  # one that has gone again
                        waiting.append(self._listener.accept()[0])
                    if len(waiting) > _MOST_WAITING:
                        waiting.pop(0).close()
                elif self._shows_token(ready):
                    for stranger in {*waiting, self._listener} - {ready}:
                        stranger.close()
                    return Link(ready, self._keep_alive, "head")
                else:
                    waiting.remove(ready)
                    ready.close()
            self._heed_end()
            code = None if self._process is None else self._process.poll()
            if start_at is None and code is not None:
                dropped = code == SSH_FAILED and time.monotonic() - started < DROPPED_SECONDS
                pause = next(pauses, None) if dropped else None
                if pause is None:
                    raise Lost(f"the starter ended with {code}: {shlex.join(self._words)}")
                tries += 1
                _say(
                    f"ecrm: host {self._host.name}: the starter ended with {code}, "
                    f"trying again ({tries} of {1 + len(PAUSES)})"
                )
                start_at = time.monotonic() + pause * random.uniform(0.5, 1.0)
        raise Lost(f"no answer within {START_SECONDS:.0f} s from: {shlex.join(self._words)}")

    def _shows_token(self, connection: socket.socket) -> bool:
        """Whether the first line on a connection is the agent's; it is one packet, or it is not."""
        try:
            line, newline, _ = connection.recv(
                _TOKEN_BYTES, socket.MSG_DONTWAIT | socket.MSG_PEEK
            ).partition(b"\n")
            token = json.loads(line)["token"]
            connection.recv(len(line + newline))  # what comes behind it is the link's
            return hmac.compare_digest(token.encode(), self._token.encode())
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return False

    def _heed_end(self) -> None:
        """Raises Lost if mpirun has sent a signal."""
        if self._signalled():
            raise Lost("ended before the rank was started")

    def _wait(self, files: Sequence[Readable], seconds: float) -> list[Readable]:
        """Those of `files` with something to read, after at most `seconds`.

        Raises Lost when mpirun is gone.
        """
        watched: list[Readable | int] = [*files, self._signals]
        ready, _, _ = select.select(watched, [], [], min(seconds, _POLL_SECONDS))
        if os.getppid() != self._parent:
            raise Lost("mpirun is gone")
        return [file for file in ready if not isinstance(file, int)]

    def _signalled(self) -> list[int]:
        """The signals that came since the last call."""
        try:
            return [number for number in os.read(self._signals, 64) if number != signal.SIGCHLD]
        except BlockingIOError:
            return []


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the rank that mpirun started on the host that the hosts file gives it.

    Ends as the rank does. Whatever goes wrong here ends in SIGKILL: an exit of its own would leave
    the other ranks waiting for ever.
    """
    args = _parser().parse_args(argv)
    parent = os.getppid()
    try:
        rank, ranks = (int(os.environ[name]) for name in ("PMIX_RANK", "OMPI_COMM_WORLD_SIZE"))
        _be(rank, place(read_hosts(args.hosts), ranks, args.hosts), args)
    except (EcrmError, OSError) as error:
        _say(f"ecrm: error: {error}")
    except BaseException as error:
        _say(
            f"ecrm: error: {type(error).__name__} in the client of rank "
            f"{os.environ.get('PMIX_RANK')}: {error}"
        )
    if not Beginning(args.begun).is_over(now=True):
        _end_all(parent)
    _die()


def _be(rank: int, placed: Sequence[Host], args: argparse.Namespace) -> NoReturn:
    parent, host = os.getppid(), placed[rank]
    clients = Noticeboard(who=CLIENTS)
    clients.put(rank, os.getpid())
    others = Neighbours(
        PATIENCE["head"] * args.keep_alive, clock=AwakeClock(2 * _POLL_SECONDS), who=CLIENTS
    )
    reach = Reach(
        host, placed[:rank].count(host), args.head, args.keep_alive, args.starter, args.command
    )
    begins, cuts = Beginning(args.begun), Cuts(rank, placed, args.keep_alive, clients, _say)
    try:
        end = reach.run(cuts, lambda: others.look() if begins.is_over() else None)
    except Lost as error:
        begun = begins.is_over(now=True)
        ends = "" if begun else "; the run had not begun, and ends"
        _say(f"ecrm: host {host.name}: rank {rank} is given up: {error}{ends}")
        reach.leave(0)
        if not begun:
            _end_all(parent)
        _die()
    if "signal" in end:
        reach.leave(OUTPUT_SECONDS)
        if cuts.is_gone() and not begins.is_over(now=True):
            _end_all(parent)
        _die()
    reach.leave(LEAVE_SECONDS)
    os._exit(end["exit"])


class Beginning:
    """The time until all ranks have met, which `file` shows; None: it is over at once.

    The file lies in a folder that may be slow, or gone: it is asked for once a second until it is
    there, and never after.
    """

    def __init__(self, file: Path | None) -> None:
        self._file, self._asked, self._over = file, 0.0, False

    def is_over(self, now: bool = False) -> bool:
        """Whether it is over, as far as is known.

        `now` asks again, and takes a folder that cannot say for one that has the file.
        """
        if self._file is None:
            return True
        if not self._over and (now or time.monotonic() - self._asked >= 1.0):
            self._asked = time.monotonic()
            try:
                self._over = self._file.exists() and bool(read_own(self._file, launch_id()))
            except OSError:
                return now
        return self._over


def _end_all(parent: int) -> None:
    """Tell mpirun to end: the other ranks would wait in MPI_Init for this one, for ever."""
    if os.getppid() == parent:
        os.kill(parent, signal.SIGTERM)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ecrm.launch.remote_rank", description="Run one rank on another host."
    )
    parser.add_argument("--hosts", type=Path, required=True)
    parser.add_argument("--head", required=True, help="this machine's address, as the hosts see it")
    parser.add_argument("--keep-alive", type=float, default=DEFAULT_KEEP_ALIVE)
    parser.add_argument("--starter", default=DEFAULT_STARTER)
    parser.add_argument("--begun", type=Path, help="a file that is there once all ranks have met")
    parser.add_argument("command", nargs="+")
    return parser


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, line.encode() + b"\n")


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


if __name__ == "__main__":
    main()

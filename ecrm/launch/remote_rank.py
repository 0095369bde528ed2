"""The client of a rank on another host: the process taken by mpirun for the rank.

The client starts an agent on the rank's host through a starter (ssh, or a different command able to
run a command on the host). Client and agent keep a connection alive. When the rank dies, or its
host falls silent, the client SIGKILLs itself: mpirun tells all ranks of such an end within
milliseconds, unlike of any other end. Clients look after each other, too: a client kills a stopped
client. The rank has been killed before by the stopped client's agent, which hears nothing.
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

from ecrm.base.errors import EcrmError, UsageError
from ecrm.launch.hosts_file import Host, place, read_hosts
from ecrm.process import remote_agent
from ecrm.process.linux import when_parent_ends
from ecrm.process.neighbours import AwakeClock, Neighbours, PidNotes
from ecrm.process.preflight import HOST, JOB_FOLDER
from ecrm.process.remote_agent import PATIENCE, START_SECONDS, Link, Lost
from ecrm.run.reading import launch_id, read_own

AT_ONCE = 4
"""Starters of a host under way at once, of sshd's ten (MaxStartups 10:30:100)."""

DEFAULT_KEEP_ALIVE = 2.0
DEFAULT_STARTER = (
    "ssh -T -o BatchMode=yes -o ControlPath=none -o ConnectTimeout=10 "
    "-o ServerAliveInterval=2 -o ServerAliveCountMax=3 {address} {command}"
)
FIELDS = ("{host}", "{address}", "{command}")
# Prefixes of the variables of this process needed by a rank on another host.
HANDED_ON = ("PMIX_", "OMPI_", "OPAL_", "PRTE_", "ECRM_", "OMP_", "MKL_", "OPENBLAS_")
Readable = TypeVar("Readable", bound=Link | socket.socket)
CLIENTS = "clients"
OUTPUT_SECONDS = 0.2  # for the last output of a killed rank
LEAVE_SECONDS = 5.0  # for the last output of a rank ending by itself
SSH_FAILED = 255  # the exit code of ssh itself, above all of a connection dropped by sshd
DROPPED_SECONDS = 5.0  # after a longer time a different failure is the cause
PAUSES = (0.5, 1.0, 2.0, 4.0)  # before a restart of the starter, at random down to half
_POLL_SECONDS = 0.5
_TURN_POLL_SECONDS = 0.02
_MOST_WAITING = 16  # connections without a token so far
_TOKEN_BYTES = 200  # longer than the first line from an agent


@contextlib.contextmanager
def turn(
    host: str, place: int, wait: Callable[[], None], environ: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Hold a turn while the rank with number `place` on its host is started.

    At most AT_ONCE ranks of a host hold a turn at once. Calls `wait` between looks whether the turn
    has come. Without a folder of the job no rank waits.
    """
    folder = environ.get(JOB_FOLDER)
    if folder is None:
        yield
        return
    # A lock dies with its process, so a killed client holds up no other client.
    with open(Path(folder) / f"ecrm-start-{host}-{place % AT_ONCE}", "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                wait()
        yield


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


def handed_on(environ: Mapping[str, str], host: Host) -> dict[str, str]:
    """The variables given to a rank on `host`, on top of the variables of the host itself."""
    return {
        **{name: value for name, value in environ.items() if name.startswith(HANDED_ON)},
        HOST: host.name,
    }


class RemoteRank:
    """One rank on another host; `run` returns the rank's end, or raises Lost."""

    def __init__(
        self,
        host: Host,
        place: int,
        head: str,
        keep_alive: float,
        starter: str,
        command: Sequence[str],
    ) -> None:
        """Prepare to start the rank with number `place` among the ranks on `host`, from 0."""
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

    def run(self, between: Callable[[], None]) -> dict[str, Any]:
        """Start the rank; return how the rank ended, as told by its agent.

        Calls `between` now and then while the rank runs. Raises Lost if the rank must be given up.
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
        while True:
            self._wait([link], link.beat())
            between()
            for number in self._signalled():
                link.send(signal=number)
            for message in link.receive():
                if "error" in message:
                    raise Lost(f"cannot start the rank there: {message['error']}")
                if not isinstance(message.get("exit", message.get("signal")), int):
                    raise Lost("what came is no message")
                link.finish()
                return message

    def leave(self, seconds: float) -> None:
        """Give the starter `seconds` to pass on the rank's last output, then end the starter."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            if self._process.poll() is None:
                # a starter of another user, as under sudo: ends with its connection
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self) -> None:
        # A file and not a pipe: a starter not reading its input holds up no process.
        with open(os.memfd_create("order"), "w+b") as order:
            order.write(json.dumps(self._order).encode() + b"\n")
            order.seek(0)
            try:
                # A separate process group: mpirun's signals are for this process, to be passed on.
                self._process = subprocess.Popen(
                    self._words,
                    stdin=order,
                    process_group=0,
                    preexec_fn=lambda: when_parent_ends(signal.SIGKILL),
                )
            except OSError as error:
                raise Lost(f"cannot run the starter {self._words[0]}: {error.strerror}") from None

    def _connect(self) -> Link:
        """Start the agent; return the connection with its token, and close other connections."""
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
                    with contextlib.suppress(OSError):  # the caller has gone again
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
        """Whether the first line on a connection is the agent's, sent in one packet."""
        try:
            line, newline, _ = connection.recv(
                _TOKEN_BYTES, socket.MSG_DONTWAIT | socket.MSG_PEEK
            ).partition(b"\n")
            token = json.loads(line)["token"]
            connection.recv(len(line + newline))  # bytes behind the line belong to the link
            return hmac.compare_digest(token.encode(), self._token.encode())
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return False

    def _heed_end(self) -> None:
        """Raise Lost if mpirun has sent a signal."""
        if self._signalled():
            raise Lost("ended before the rank was started")

    def _wait(self, files: Sequence[Readable], seconds: float) -> list[Readable]:
        """The files of `files` with something to read, after at most `seconds`.

        Raises Lost when mpirun is gone.
        """
        watched: list[Readable | int] = [*files, self._signals]
        ready, _, _ = select.select(watched, [], [], min(seconds, _POLL_SECONDS))
        if os.getppid() != self._parent:
            raise Lost("mpirun is gone")
        return [file for file in ready if not isinstance(file, int)]

    def _signalled(self) -> list[int]:
        """The signals since the last call, without SIGCHLD."""
        try:
            return [number for number in os.read(self._signals, 64) if number != signal.SIGCHLD]
        except BlockingIOError:
            return []


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the rank started by mpirun on the host given to the rank by the hosts file.

    Ends as the rank does. Every failure in this process ends in SIGKILL: a plain exit would leave
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
    if not StartMark(args.begun).is_over(now=True):
        _end_all(parent)
    _die()


def _be(rank: int, placed: Sequence[Host], args: argparse.Namespace) -> NoReturn:
    parent, host = os.getppid(), placed[rank]
    PidNotes(who=CLIENTS).put(rank, os.getpid())
    others = Neighbours(
        PATIENCE["head"] * args.keep_alive, clock=AwakeClock(2 * _POLL_SECONDS), who=CLIENTS
    )
    reach = RemoteRank(
        host, placed[:rank].count(host), args.head, args.keep_alive, args.starter, args.command
    )
    begins = StartMark(args.begun)
    try:
        end = reach.run(lambda: others.look() if begins.is_over() else None)
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
        if not begins.is_over(now=True):
            _say(
                f"ecrm: host {host.name}: rank {rank} died of signal {end['signal']}; "
                "the run had not begun, and ends"
            )
            _end_all(parent)
        _die()
    reach.leave(LEAVE_SECONDS)
    os._exit(end["exit"])


class StartMark:
    """The time until all ranks have met, as shown by `file`; `None`: over at once.

    The file lies in a folder, perhaps slow, or gone: the file is looked for once a second until
    found, and never after.
    """

    def __init__(self, file: Path | None) -> None:
        self._file, self._asked, self._over = file, 0.0, False

    def is_over(self, now: bool = False) -> bool:
        """Whether the beginning is over, as far as known.

        `now` looks again at once, and counts an unreadable folder as a folder with the file.
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
    """Tell mpirun to end: the other ranks would wait in MPI_Init for this rank, for ever."""
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

"""The ranks of a run on other hosts: the process that stands in the place of mpirun.

One process starts an agent on every host, prints the output of all ranks, passes signals on, and
tells the head of the run of every death. Without MPI: ranks on other hosts talk by links alone.

The process ends with the exit code of the ranks. After the first exit with an error the remaining
ranks have 5 s to end, too. A death before all ranks have met ends the run. Once no rank of the
start is left, the process waits for the ranks that have joined since.

`ecrm join` runs its ranks in the same way: then an exit with an error ends no other rank.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ecrm.base.errors import EcrmError
from ecrm.base.wording import named
from ecrm.launch.hosts_file import Host, place, read_hosts
from ecrm.launch.remote_host import DEFAULT_KEEP_ALIVE, DEFAULT_STARTER, RemoteHost
from ecrm.process import remote_agent
from ecrm.process.farewell import OTHERS_SECONDS
from ecrm.process.neighbours import JOB, RANK
from ecrm.process.preflight import FAULT_TOLERANT, SIZE
from ecrm.process.remote_agent import BUFFER_BYTES, Lost, host_of
from ecrm.process.startup import LOCAL_SIZE
from ecrm.run.reading import LAUNCH, launch_id, read_own
from ecrm.transport.membership_socket import (
    LINKS,
    WATCHER,
    Rendezvous,
    decoded,
    encoded,
    secret_to,
)

LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
LEAVE_SECONDS = 5.0
"""Time of starters after the last rank."""
END_SECONDS = 2.0
"""Time in which agents that are asked to end kill their ranks and answer."""
LINE_SECONDS = 0.3
"""Time after which output without the end of its line is printed."""
SAID_AGAIN = (0.0, 0.05, 0.1, 0.2, 0.4)
"""Seconds after a death at which the head of the run is told."""
ASK_SECONDS = 0.2
"""Time between two questions to the head whether any member lives."""
PASS_DATAGRAMS = 256
"""The most datagrams that are taken before an answer."""
STARTS = 4
"""Starters started at once: a start takes some milliseconds, and agents wait for signs of life."""
MOST_PRINTS = 256
"""Pieces of output that may wait for a slow terminal; more wait with the ranks."""


class RemoteRun:
    """All hosts of a run, from the start of the agents to the end of the ranks."""

    def __init__(
        self,
        hosts: Sequence[RemoteHost],
        meeting: socket.socket,
        begun: StartMark,
        word: HeadWord,
        joining: bool = False,
    ) -> None:
        """`meeting` is the socket on which agents are heard.

        `joining`: the ranks join a run, go on without each other, and outlive the parent of this
        process, as a connection of ssh that breaks.
        """
        self._hosts, self._socket, self._begun = hosts, meeting, begun
        self._next_sweep, self._parent = 0.0, None if joining else os.getppid()
        self._printer, self._word, self._joining = Printer(), word, joining
        self._codes: list[int] = []
        self._deadline: float | None = None
        self._told_refused = False
        self._signals, writing = os.pipe()
        os.set_blocking(self._signals, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in remote_agent.PASSED_ON:
            signal.signal(number, lambda *_: None)

    def run(self, keep_alive: float) -> int:
        """Run all ranks; return the exit code of the run."""
        sweep_seconds = remote_agent.BEAT * keep_alive / 4
        while (self._running() or self._others_live()) and not self._must_end():
            watched: list[socket.socket | int] = [self._socket, self._signals]
            select.select(watched, [], [], sweep_seconds)
            self._heed_signals()
            heard: Sequence[RemoteHost] = self._receive()
            now = time.monotonic()
            if now >= self._next_sweep:
                self._next_sweep, heard = now + sweep_seconds, self._hosts
                self._printer.flush(now)
                waiting = [host for host in self._hosts if host.running and host.must_start]
                for host in waiting[:STARTS]:
                    self._look(host, start=True)
                for host in self._hosts:
                    if host.running:
                        self._look(host)
            self._send(heard)
            self._word.say(now)
        self._end()
        return next(filter(None, self._codes), 0 if self._codes else 1)

    def _running(self) -> bool:
        return any(host.running for host in self._hosts)

    def _others_live(self) -> bool:
        """Whether ranks that have joined go on, now that the ranks of the start have ended."""
        if self._joining or any(self._codes) or not self._begun.is_over():
            return False
        return self._word.members_live(time.monotonic())

    def _must_end(self) -> bool:
        late = self._deadline is not None and time.monotonic() > self._deadline
        return late or self._parent not in (None, os.getppid())

    def _end_now(self) -> None:
        self._deadline = 0.0

    def _look(self, host: RemoteHost, start: bool = False) -> None:
        try:
            if start:
                host.start()
            if (line := host.look()) is not None:
                self._printer.say(line)
        except Lost as error:
            self._give_up(host, host.running.copy(), str(error))

    def _give_up(self, host: RemoteHost, ranks: set[int], reason: str) -> None:
        """Count ranks as dead: their agent has ended the ranks, or will before the head goes on."""
        host.running -= ranks
        if not host.running:
            host.leave(0)
        begun = self._begun.is_over(now=True)
        what = named("rank", sorted(ranks)) + (" is" if len(ranks) == 1 else " are")
        ends = "" if begun else "; the run had not begun, and ends"
        self._printer.say(f"host {host.host.name}: {what} given up: {reason}{ends}")
        self._died(ranks, begun)

    def _died(self, ranks: set[int], begun: bool) -> None:
        self._word.died(ranks)
        if not begun or self._joining:
            self._codes.append(1)
        if not begun:
            self._end_now()

    def _receive(self) -> list[RemoteHost]:
        """Take what has come; return the hosts heard."""
        heard: dict[int, RemoteHost] = {}
        for _ in range(PASS_DATAGRAMS):  # agents want answers, whatever strangers send
            try:
                datagram, sender = self._socket.recvfrom(1 << 16)
            except OSError:
                break
            number = host_of(datagram)
            host = self._hosts[number] if number is not None and number < len(self._hosts) else None
            try:
                messages = (
                    None if host is None else host.hear(datagram, sender, not self._printer.is_full)
                )
                if host is None or messages is None:
                    self._refuse(sender[0])
                    continue
                heard[host.number] = host
                for message in messages:
                    self._take(host, message)
            except Lost as error:
                assert host is not None
                if host.running:
                    self._give_up(host, host.running.copy(), str(error))
        return list(heard.values())

    def _take(self, host: RemoteHost, message: tuple[int, int, bytes] | dict[str, Any]) -> None:
        if isinstance(message, tuple):
            self._printer.take(*message)
            return
        rank = message["rank"]
        self._printer.flush_rank(rank)
        if "exit" in message:
            self._codes.append(message["exit"])
            if message["exit"] and self._joining:
                self._word.died({rank})
            elif message["exit"] and self._deadline is None:
                self._deadline = time.monotonic() + OTHERS_SECONDS
        elif "error" in message:
            self._give_up(host, {rank}, f"cannot start the rank there: {message['error']}")
        else:
            begun = self._begun.is_over(now=True)
            if not begun:
                self._printer.say(
                    f"host {host.host.name}: rank {rank} died of signal {message['signal']}; "
                    "the run had not begun, and ends"
                )
            self._died({rank}, begun)

    def _refuse(self, address: str) -> None:
        if not self._told_refused:
            self._told_refused = True
            self._printer.say(f"{address} is no host of this run: refused (told once)")

    def _send(self, hosts: Sequence[RemoteHost]) -> None:
        for host in hosts:
            for datagram in host.due():
                with contextlib.suppress(OSError):  # as a lost datagram: said again
                    self._socket.sendto(datagram, host.address)

    def _heed_signals(self) -> None:
        """Pass signals on to all ranks; SIGTERM, SIGINT and SIGHUP end the run."""
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._signals, 64):
                if number in (signal.SIGUSR1, signal.SIGUSR2) and all(
                    host.has_met for host in self._hosts
                ):
                    for host in self._hosts:
                        host.say(signal=number)
                    if not self._running():
                        self._word.stop(number)
                elif number in remote_agent.PASSED_ON:
                    self._end_now()

    def _end(self) -> None:
        """Have all agents end, and print the last lines."""
        ours = {rank for host in self._hosts for rank in host.running}
        for host in self._hosts:
            if host.has_met and host.running:
                host.say(end=1)
        deadline = time.monotonic() + END_SECONDS
        while self._running() and time.monotonic() < deadline:
            self._send(self._hosts)
            select.select([self._socket], [], [], 0.02)
            self._receive_last()
        for _ in range(3):  # acknowledgements of the last messages
            self._send(self._hosts)
            time.sleep(0.01)
            self._receive_last()
        if self._joining and not self._running():  # of joins the head learns from this process
            self._word.died(ours)
        self._word.say(time.monotonic() + SAID_AGAIN[-1])
        late = time.monotonic() + LEAVE_SECONDS
        for host in self._hosts:
            host.leave(0 if self._running() else max(late - time.monotonic(), 0))
        self._printer.close()

    def _receive_last(self) -> None:
        """As `_receive`; what a rank says of its end has no consequence any more."""
        with contextlib.suppress(BlockingIOError, Lost):
            for _ in range(PASS_DATAGRAMS):
                datagram, sender = self._socket.recvfrom(1 << 16)
                number = host_of(datagram)
                if number is None or number >= len(self._hosts):
                    continue
                for message in self._hosts[number].hear(datagram, sender, True) or ():
                    if isinstance(message, tuple):
                        self._printer.take(*message)


class HeadWord:
    """Tells the head of the run of deaths, a few times each: the ranks' leases tell it, too.

    Also asks whether any member lives, and passes on a wish to stop.
    """

    def __init__(self, text: str | None, lives: Mapping[int, str] | None = None) -> None:
        """`text` is the rendezvous of the run; without a text nobody is told.

        `lives` are the lives of ranks that join; without lives the ranks are those of the start.
        """
        self._run, self._lives = None if text is None else Rendezvous.of_text(text), lives
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._waiting: list[tuple[float, set[int]]] = []
        self._stops: list[tuple[float, int]] = []
        self._asked, self._next_ask, self._heard, self._live = 0, 0.0, 0.0, True

    def died(self, ranks: set[int]) -> None:
        """The death of these ranks is certain, or is certain by the keep-alive time."""
        now = time.monotonic()
        self._waiting += [(now + seconds, ranks) for seconds in SAID_AGAIN]
        self.say(now)

    def say(self, now: float) -> None:
        """Say what is due."""
        for at, number in self._stops:
            if at <= now:
                self._tell({"is": "stop", "signal": number})
        self._stops = [(at, number) for at, number in self._stops if at > now]
        due = [ranks for at, ranks in self._waiting if at <= now]
        self._waiting = [(at, ranks) for at, ranks in self._waiting if at > now]
        if not due:
            return
        dead = sorted(set().union(*due))
        if self._lives is None:
            self._tell({"is": "died", "dead": dead})
        else:
            for rank in dead:
                self._tell({"is": "gone", "rank": rank, "life": self._lives[rank]})

    def stop(self, number: int) -> None:
        """Have all members stop, as after a signal to the launch."""
        asks, now = signal.SIGINT if number == signal.SIGUSR1 else signal.SIGTERM, time.monotonic()
        self._stops += [(now + seconds, int(asks)) for seconds in SAID_AGAIN]  # once has an effect
        self.say(now)

    def members_live(self, now: float) -> bool:
        """Whether the run has a member, as far as known; a silent head has none."""
        if self._run is None:
            return False
        if not self._asked:
            self._heard = now
        with contextlib.suppress(OSError):
            for _ in range(PASS_DATAGRAMS):
                datagram = self._socket.recv(1 << 16)
                said = decoded(self._run.run, secret_to(self._run.secret, WATCHER), datagram)
                if said is not None and said.get("number") == self._asked:
                    self._heard, self._live = now, bool(said.get("live"))
        if now >= self._next_ask:
            self._next_ask, self._asked = now + ASK_SECONDS, self._asked + 1
            self._tell({"is": "members", "number": self._asked})
        return self._live and now - self._heard < self._run.keep_alive

    def _tell(self, message: Mapping[str, Any]) -> None:
        if self._run is not None:
            datagram = encoded(self._run.run, self._run.secret, message)
            with contextlib.suppress(OSError):  # the head is gone, and with it the run
                self._socket.sendto(datagram, self._run.head)


class Printer:
    """Prints the output of ranks in whole lines, in a thread: a terminal may be slow."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], tuple[bytes, float]] = {}
        self._queue: queue.Queue[tuple[int, bytes] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._print, name="printer", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether the terminal is far behind."""
        return self._queue.qsize() > MOST_PRINTS

    def say(self, line: str) -> None:
        """Print a line of this process on stderr."""
        self._queue.put((2, f"ecrm: {line}\n".encode()))

    def take(self, file: int, rank: int, data: bytes) -> None:
        """Print output of a rank up to its last end of line."""
        before, since = self._waiting.pop((file, rank), (b"", time.monotonic()))
        lines, newline, rest = (before + data).rpartition(b"\n")
        if newline:
            self._queue.put((file, lines + newline))
            since = time.monotonic()
        if rest:
            self._waiting[file, rank] = rest, since

    def flush(self, now: float) -> None:
        """Print output that has waited for the end of its line."""
        for key, (data, since) in [*self._waiting.items()]:
            if now - since >= LINE_SECONDS:
                del self._waiting[key]
                self._queue.put((key[0], data))

    def flush_rank(self, rank: int) -> None:
        """Print what is left of an ended rank."""
        for key in [each for each in self._waiting if each[1] == rank]:
            self._queue.put((key[0], self._waiting.pop(key)[0]))

    def close(self) -> None:
        """Print all; wait for the terminal at most LEAVE_SECONDS."""
        self.flush(float("inf"))
        self._queue.put(None)
        self._thread.join(LEAVE_SECONDS)

    def _print(self) -> None:
        while (piece := self._queue.get()) is not None:
            file, data = piece
            with contextlib.suppress(OSError):  # nobody reads
                while data:
                    data = data[os.write(file, data) :]


class StartMark:
    """The time until all ranks have met, as shown by `file`; `None`: over at once.

    The file lies in a folder, perhaps slow, or gone: a thread looks for the file once a second
    until found, and never after.
    """

    def __init__(self, file: Path | None) -> None:
        self._file, self._over = file, file is None
        self._asked, self._answered = threading.Event(), threading.Event()
        if file is not None:
            threading.Thread(target=self._look, name="start mark", daemon=True).start()

    def is_over(self, now: bool = False) -> bool:
        """Whether the beginning is over, as far as known.

        `now` looks again, for a tenth of a second at most, and counts a folder that cannot be read
        as a folder with the file.
        """
        if not self._over and now:
            self._answered.clear()
            self._asked.set()
            if not self._answered.wait(0.1):
                return True
        return self._over

    def _look(self) -> None:
        assert self._file is not None
        while not self._over:
            asked = self._asked.wait(1.0)
            self._asked.clear()
            try:
                self._over = self._file.exists() and bool(read_own(self._file, launch_id()))
            except OSError:
                self._over = asked
            self._answered.set()


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the ranks on the hosts of the hosts file; end with the exit code of the ranks."""
    args = _parser().parse_args(argv)
    try:
        placed = place(read_hosts(args.hosts), args.ranks, args.hosts)
        code = _run(placed, args)
    except (EcrmError, OSError) as error:
        print(f"ecrm: error: {error}", file=sys.stderr, flush=True)
        code = getattr(error, "exit_code", 1)
    os._exit(code)


def meeting_at(address: str) -> socket.socket:
    """The socket on which agents are heard."""
    meeting = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    meeting.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    meeting.bind((address, 0))
    meeting.setblocking(False)
    return meeting


def _run(placed: Sequence[Host], args: argparse.Namespace) -> int:
    meeting = meeting_at(args.head)
    job = f"ecrm-{os.environ.get(LAUNCH, os.getpid())}"
    ranks = {host: variables_of(placed, host, job) for host in dict.fromkeys(placed)}
    if args.only is not None:
        ranks = {
            host: dict([*of.items()][:1]) for host, of in ranks.items() if host.name == args.only
        }
    hosts = [
        RemoteHost(
            number, host, of, args.command, meeting.getsockname(), args.keep_alive, args.starter
        )
        for number, (host, of) in enumerate(ranks.items())
    ]
    word = HeadWord(os.environ.get(LINKS))
    return RemoteRun(hosts, meeting, StartMark(args.begun), word).run(args.keep_alive)


def variables_of(placed: Sequence[Host], host: Host, job: str) -> dict[int, dict[str, str]]:
    """The variables of each rank on a host, under the names used by mpirun."""
    ranks = [rank for rank, its in enumerate(placed) if its == host]
    return {
        rank: {
            JOB: job,
            RANK: str(rank),
            SIZE: str(len(placed)),
            LOCAL_SIZE: str(len(ranks)),
            LOCAL_RANK: str(local),
            FAULT_TOLERANT: "1",
        }
        for local, rank in enumerate(ranks)
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ecrm.launch.remote_run", description="Run ranks on other hosts."
    )
    parser.add_argument("--hosts", type=Path, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--head", required=True, help="this machine's address, as the hosts see it")
    parser.add_argument("--keep-alive", type=float, default=DEFAULT_KEEP_ALIVE)
    parser.add_argument("--starter", default=DEFAULT_STARTER)
    parser.add_argument("--begun", type=Path, help="a file that is there once all ranks have met")
    parser.add_argument("--only", help="the name of a host: start its first rank alone")
    parser.add_argument("command", nargs="+")
    return parser


if __name__ == "__main__":
    main()

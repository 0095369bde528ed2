"""The agent of a host: starts the ranks there, and kills them when the head machine falls silent.

The agent runs on its host by its path alone (`python -I -S .../remote_agent.py`), and therefore
imports only the standard library and needs neither a current folder nor variables. The order comes
as a line of JSON on standard input, out of sight of other users: the head's address, the secret of
the talk, and the ranks' command, folder and variables.

Agent and head machine talk by datagrams with proofs (see Talk): no connection can break. The agent
kills its ranks when the head is not heard, or does not hear, before the head gives the host up. A
host that was only cut off therefore comes back without its ranks. A rank stopped for the keep-alive
time is killed; when the agent itself is stopped, the guards kill their ranks.

The agent also carries the beats of its ranks to the head of the run, a dozen in a datagram.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

START_SECONDS = 30.0  # for the starter, the order and the first answer
BEAT = 0.05  # of the keep-alive time, between two signs of life
# of the keep-alive time, without a sign: the sides differ by more than a beat
PATIENCE = {"agent": 0.7, "head": 0.9}
# patience of a rank's guard with a stopped agent, passed by the variable
GUARD_PATIENCE, GUARDS_SHARE = "ECRM_AGENT_SECONDS", 0.6
RANK = "PMIX_RANK"  # the variable with the number of a rank
LINKS, BEATS_TO = "ECRM_LINKS", "ECRM_BEATS"  # the rendezvous of a run; where its ranks beat to
LONGEST_BEAT = 0.5  # seconds between two beats, however long the keep-alive time
# signals that may be passed on to the ranks
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
MOST_BYTES = 1100  # of a message: a datagram fits into a frame of Ethernet
BUFFER_BYTES = 4 << 20
DIGEST_BYTES = 32
_WINDOW = 64  # messages under way
_AGAIN = 8  # messages said again at once
# datagrams in the buffer: the system doubles it, and counts at least 512 bytes each
_MOST_WAITING = 2 * BUFFER_BYTES // 512
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.8  # seconds before messages are said again
_HEAD = struct.Struct("<cIQQQQQ")
_OUTPUT = struct.Struct("<BI")  # 1 or 2 for the file, and the rank
_LAST_MESSAGES = 1000  # more than a full pipe
_LEAVE_SECONDS = 5.0
_DYING_SECONDS = 5.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_PF_EXITING = 0x4  # of the flags in proc_pid_stat(5)


class Lost(Exception):
    """The other side is silent or cannot be reached; the message says which."""


class Talk:
    """One side of the talk of an agent with the head, without I/O: datagrams out, datagrams in.

    `side` is "agent" or "head", `host` the number of the host. A datagram has a proof of the
    secret, the number of the agent's `life`, the datagram's own number, the number of the last
    datagram heard, the next message expected, and at most one message. Messages are bytes. A
    message is numbered, kept until acknowledged, and said again. So each message arrives once, in
    order, however datagrams are lost, doubled or late.

    Every datagram is a sign of life. From the numbers the agent knows the last of its datagrams
    heard by the head, whichever way the network is cut. A side gives up PATIENCE after the last
    datagram heard. The agent also gives up PATIENCE after sending the last datagram heard by the
    head, earlier than the head, whose PATIENCE is longer. A head talks to the agent heard first:
    a second agent, of a starter that was started again, gets no answer and starts no rank.
    """

    def __init__(
        self,
        secret: bytes,
        side: str,
        host: int,
        keep_alive: float,
        life: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secret, self._side, self._host, self._clock = secret, side, host, clock
        self._beat, self._patience = BEAT * keep_alive, PATIENCE[side] * keep_alive
        self._life = life  # 0 at a head that has heard no agent
        self.met = False
        """Whether the other side has been heard."""
        self._heard_at = self._known_heard = clock()
        self._sent: dict[int, float] = {}
        self._number = self._last = 0
        self._next_beat = 0.0
        self._kept: dict[int, bytes] = {}
        self._told = self._said = 0
        self._expected = 1
        self._early: dict[int, bytes] = {}
        self._pause, self._again_at, self._owed = _FIRST_PAUSE, 0.0, False

    def send(self, message: bytes) -> None:
        """Have a message said, of at most MOST_BYTES bytes."""
        self._told += 1
        self._kept[self._told] = message

    @property
    def is_full(self) -> bool:
        """Whether many messages wait: output of the ranks had better wait, too."""
        return len(self._kept) >= _WINDOW

    @property
    def all_heard(self) -> bool:
        """Whether the other side has all messages."""
        return not self._kept

    def due(self) -> list[bytes]:
        """The datagrams to send now."""
        now, datagrams = self._clock(), []
        if not self._life:
            return []
        oldest = self._told - len(self._kept)
        while self._said < min(self._told, oldest + _WINDOW):
            if self._said == oldest:  # nothing was under way
                self._again_at = now + self._pause
            self._said += 1
            datagrams.append(self._datagram(now, self._said))
        if self._kept and self._said > oldest and now >= self._again_at:
            datagrams += [
                self._datagram(now, number)
                for number in range(oldest + 1, min(self._said, oldest + _AGAIN) + 1)
            ]
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._again_at = now + self._pause
        if not datagrams and (self._owed or now >= self._next_beat):
            datagrams.append(self._datagram(now, 0))
        return datagrams

    def next(self) -> float:
        """Seconds until `due` or `check` has something to do."""
        now = self._clock()
        until = min(self._heard_at, self._known_heard) + self._patience + 0.001
        times = [self._next_beat, until] + ([self._again_at] if self._kept else [])
        return min(max(min(times) - now, 0.001), self._beat)

    def hear(self, datagram: bytes, take: bool = True) -> list[bytes] | None:
        """The messages that have become complete by a datagram; `None` for a stranger's datagram.

        Without `take` a message in the datagram stays with the other side, which says it again.
        """
        text, proof = datagram[DIGEST_BYTES:], datagram[:DIGEST_BYTES]
        if len(text) < _HEAD.size or not hmac.compare_digest(proof, self._proof(text)):
            return None
        side, host, life, beat, heard, expected, number = _HEAD.unpack_from(text)
        if side != _letter("agent" if self._side == "head" else "head") or host != self._host:
            return None
        if not self._life:
            self._life = life
        if life != self._life:
            return []
        now = self._clock()
        if beat > self._last:  # a late or repeated datagram is no sign of life
            self.met = True
            self._last, self._heard_at = beat, now
        self._known_heard = max(self._known_heard, self._sent.get(heard, 0.0))
        self._sent = {each: at for each, at in self._sent.items() if each > heard}
        acknowledged = [each for each in self._kept if each < expected]
        for each in acknowledged:
            del self._kept[each]
        if acknowledged:
            self._pause, self._again_at = _FIRST_PAUSE, now + _FIRST_PAUSE
        if not number:
            return []
        self._owed = True
        if take and self._expected <= number < self._expected + _WINDOW:
            self._early[number] = text[_HEAD.size :]
        complete = []
        while self._expected in self._early:
            complete.append(self._early.pop(self._expected))
            self._expected += 1
        return complete

    def check(self) -> None:
        """Raise Lost if the other side has said or heard nothing for too long."""
        now = self._clock()
        if now - self._heard_at > self._patience:
            raise Lost(f"nothing was heard for {now - self._heard_at:.1f} s")
        if self._side == "agent" and now - self._known_heard > self._patience:
            raise Lost(f"it has heard nothing for {now - self._known_heard:.1f} s")

    def _datagram(self, now: float, number: int) -> bytes:
        self._number += 1
        self._sent[self._number] = now
        self._next_beat, self._owed = now + self._beat, False
        head = (_letter(self._side), self._host, self._life)
        text = _HEAD.pack(*head, self._number, self._last, self._expected, number)
        text += self._kept.get(number, b"")
        return self._proof(text) + text

    def _proof(self, text: bytes) -> bytes:
        return hmac.digest(self._secret, text, "sha256")


def _letter(side: str) -> bytes:
    return side[:1].encode()


def host_of(datagram: bytes) -> int | None:
    """The number of the host in a datagram, without proof; `None` for no datagram of a talk."""
    if len(datagram) < DIGEST_BYTES + _HEAD.size:
        return None
    host: int = _HEAD.unpack_from(datagram, DIGEST_BYTES)[1]
    return host


def output(file: int, rank: int, data: bytes) -> bytes:
    """The message with output of a rank; `file` is 1 or 2."""
    return _OUTPUT.pack(file, rank) + data


def told(**fields: Any) -> bytes:
    """A message with fields."""
    return json.dumps(fields).encode()


def understood(message: bytes) -> tuple[int, int, bytes] | dict[str, Any]:
    """The file, rank and bytes of output, or the fields of another message.

    Raises Lost for bytes that are no message.
    """
    if message[:1] in (b"\1", b"\2") and len(message) >= _OUTPUT.size:
        file, rank = _OUTPUT.unpack_from(message)
        return file, rank, message[_OUTPUT.size :]
    with contextlib.suppress(ValueError):
        fields = json.loads(message)
        if isinstance(fields, dict):
            return fields
    raise Lost("what came is no message")


class Beats:
    """The beats of a host's ranks, on the way to the head of the run in few datagrams.

    A rank beats as if the agent were the head. A beat is a datagram of `FORM` with the proof of the
    rank, as in `membership_socket`. `say` sends the last beat of each rank, MOST to a datagram. The
    head answers each datagram with one, and `hand_out` gives each rank its answer. So the lease of
    a rank stays between rank and head. The agent proves no beat of its own.

    A datagram fits into a frame: in pieces, a datagram would be lost with any of its pieces. The
    agent listens on a loopback address: no other host reaches the agent.
    """

    FORM = struct.Struct("<Q16sQQQQ")  # magic, run, kind, rank, number, news
    MAGIC, KIND = 0x3174616562726365, 1  # of beats
    MOST = MOST_BYTES // (FORM.size + DIGEST_BYTES)  # beats in a datagram

    def __init__(self, links: str) -> None:
        """`links` is the rendezvous of the run. Raises OSError without a way to the head."""
        run, secret, address, port, keep_alive = json.loads(links)
        self._secret = bytes.fromhex(secret)
        self._begin = struct.pack("<Q16sQ", self.MAGIC, bytes.fromhex(run), self.KIND)
        self._pause, self._next = min(BEAT * keep_alive, LONGEST_BEAT), 0.0
        self.head, self._here = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
        self.head.connect((address, port))
        self._here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._here.bind(("127.0.0.1", 0))
        for each in (self.head, self._here):
            each.setblocking(False)
        self._last: dict[int, int] = {}
        self._where: dict[int, Any] = {}

    @property
    def place(self) -> str:
        """Where the ranks beat to, as text."""
        return "{}:{}".format(*self._here.getsockname())

    def next(self) -> float:
        """Seconds until `say` has something to do."""
        return max(self._next - time.monotonic(), 0.0)

    def say(self) -> None:
        """Send the beats that have come, at most one of each rank, if it is time."""
        if self.next() > 0:
            return
        self._next = time.monotonic() + self._pause
        waiting: dict[int, bytes] = {}
        for datagram, sender in _datagrams(self._here):
            text, proof = datagram[: self.FORM.size], datagram[self.FORM.size :]
            if len(text) < self.FORM.size or not text.startswith(self._begin):
                continue  # before the dearer proof
            if not hmac.compare_digest(proof, hmac.digest(self._secret, text, "sha256")):
                continue
            rank, number = self.FORM.unpack(text)[3:5]
            if number > self._last.get(rank, 0):  # a later beat of a rank says all of an earlier
                self._last[rank], self._where[rank] = number, sender
                waiting[rank] = datagram
        beats = [*waiting.values()]
        for first in range(0, len(beats), self.MOST):
            with contextlib.suppress(OSError):  # as lost datagrams
                self.head.send(b"".join(beats[first : first + self.MOST]))

    def hand_out(self) -> None:
        """Give each rank the answer of the head; the ranks check its proof."""
        size = self.FORM.size + DIGEST_BYTES
        for datagram, _ in _datagrams(self.head):
            for first in range(0, len(datagram) - size + 1, size):
                answer = datagram[first : first + size]
                rank = self.FORM.unpack_from(answer)[3]
                if rank in self._where:
                    with contextlib.suppress(OSError):
                        self._here.sendto(answer, self._where[rank])


def _datagrams(at: socket.socket) -> Iterator[tuple[bytes, Any]]:
    """The datagrams that have come: a sender that goes on and on keeps nobody here."""
    for _ in range(_MOST_WAITING):
        try:
            yield at.recvfrom(1 << 16)
        except BlockingIOError:
            return
        except OSError:  # told of an earlier datagram that did not arrive
            continue


class HostedRank:
    """A rank of this host: its process, its pipes, and its end."""

    def __init__(self, number: int, command: list[str], variables: dict[str, str]) -> None:
        """Start the rank. Raises OSError."""
        self.number = number
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **variables},
            preexec_fn=_as_rank,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self.files = {self._process.stdout.fileno(): 1, self._process.stderr.fileno(): 2}
        """The open ends of its output, each with the number of the file."""
        for descriptor in self.files:
            os.set_blocking(descriptor, False)
        self.ended = os.pidfd_open(self._process.pid)
        self._pid = self._process.pid
        self._dying_since: float | None = None
        self._stopped_since: float | None = None

    @property
    def is_ending(self) -> bool:
        """Whether the process has ended; processes started by the process may be left."""
        return self._process.returncode is not None

    def signal(self, number: int) -> None:
        """Send a signal, if the rank is alive."""
        if not self.is_ending:
            os.kill(self._pid, number)

    def kill_if_stopped(self, seconds: float) -> None:
        """Kill the rank if it has been stopped for so long."""
        with contextlib.suppress(ChildProcessError):  # Linux's error for an ended process
            change_of = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
            while change := os.waitid(os.P_PID, self._pid, change_of):
                stopped = change.si_code == os.CLD_STOPPED
                self._stopped_since = time.monotonic() if stopped else None
        if self._stopped_since is not None and time.monotonic() - self._stopped_since > seconds:
            self.signal(signal.SIGKILL)

    def end(self) -> dict[str, Any] | None:
        """How the rank has ended, once none of its processes is left; `None` before.

        Kills what the rank has left. Does not wait longer than 5 s: a system call may not return.
        """
        code = self._process.poll()
        if code is None:
            return None
        now = time.monotonic()
        self._dying_since = self._dying_since or now
        if _kill(_left_of(self.number)) and now - self._dying_since < _DYING_SECONDS:
            return None
        return {"rank": self.number, **({"signal": -code} if code < 0 else {"exit": code})}

    def close(self) -> None:
        """Forget the rank."""
        os.close(self.ended)
        for file in (self._process.stdout, self._process.stderr):
            if file is not None:
                file.close()
        self.files.clear()


class Agent:
    """The ranks of this host, and the talk with the head; `run` returns at the end."""

    def __init__(self, order: dict[str, Any]) -> None:
        """Find the way to the head. Raises OSError."""
        self._order = order
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._socket.connect(tuple(order["head"]))
        self._socket.setblocking(False)
        life = secrets.randbits(63) + 1
        secret = bytes.fromhex(order["secret"])
        self._talk = Talk(secret, "agent", order["number"], order["keep_alive"], life)
        self._ranks: dict[int, HostedRank] = {}
        # all but the ranks' output, which waits while the head does not take it
        self._events, self._outputs = selectors.DefaultSelector(), selectors.DefaultSelector()
        self._events.register(self._socket, selectors.EVENT_READ)
        self._both = selectors.DefaultSelector()
        self._both.register(self._events.fileno(), selectors.EVENT_READ)
        self._both.register(self._outputs.fileno(), selectors.EVENT_READ)
        self._asked_to_end = False
        self._asked: list[int] = []
        links = {**order["variables"], **next(iter(order["ranks"]))[1]}.get(LINKS)
        self._beats = None if links is None else Beats(links)
        if self._beats is not None:
            self._events.register(self._beats.head, selectors.EVENT_READ)

    def meet(self) -> None:
        """Wait for the first answer of the head. Raises OSError."""
        deadline = time.monotonic() + START_SECONDS
        while not self._talk.met:
            self._turn(self._events)
            if time.monotonic() > deadline:
                raise OSError(f"no answer within {START_SECONDS:.0f} s")

    def run(self) -> None:
        """Run the ranks until all have ended, or the head asks to end. Raises Lost."""
        to_start = [*self._order["ranks"]]
        while (to_start or self._ranks) and not self._asked_to_end:
            if to_start:  # one at a time: a start takes a while, and the head waits for signs
                self._start(*to_start.pop(0))
            while self._asked and not to_start:
                number = self._asked.pop(0)
                for rank in self._ranks.values():
                    rank.signal(number)
            self._turn(self._events if self._talk.is_full else self._both, not to_start)
            self._talk.check()
            for rank in [*self._ranks.values()]:
                rank.kill_if_stopped(self._order["keep_alive"])
                if (end := rank.end()) is not None:
                    self._pass_on(rank, _LAST_MESSAGES)
                    self._talk.send(told(**end))
                    self._forget(rank)

    def kill(self) -> None:
        """SIGKILL all ranks at once, before the longer search for what the ranks have started."""
        for rank in self._ranks.values():
            rank.signal(signal.SIGKILL)

    def leave(self) -> None:
        """Have the head hear everything, unless the head is gone."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        with contextlib.suppress(Lost):
            while not self._talk.all_heard and time.monotonic() < deadline:
                self._turn(self._events)
                self._talk.check()
        self._socket.close()

    def _start(self, number: int, more: dict[str, str]) -> None:
        variables = {
            **self._order["variables"],
            **more,
            GUARD_PATIENCE: str(GUARDS_SHARE * self._order["keep_alive"]),
            **({} if self._beats is None else {BEATS_TO: self._beats.place}),
        }
        try:
            os.chdir(self._order["folder"])
            rank = HostedRank(number, self._order["command"], variables)
        except OSError as error:
            self._talk.send(told(rank=number, error=f"{error.filename}: {error.strerror}"[:500]))
            return
        self._ranks[number] = rank
        self._events.register(rank.ended, selectors.EVENT_READ)
        for descriptor in rank.files:
            self._outputs.register(descriptor, selectors.EVENT_READ, rank)

    def _turn(self, wait: selectors.BaseSelector, idle: bool = True) -> None:
        """Say what is due, wait for an event if `idle`, and take what has come."""
        for datagram in self._talk.due():
            with contextlib.suppress(OSError):  # as a lost datagram
                self._socket.send(datagram)
        pause = self._talk.next()
        if self._beats is not None:
            self._beats.say()
            pause = min(pause, self._beats.next())
        ending = any(rank.is_ending for rank in self._ranks.values())
        wait.select((0.005 if ending else pause) if idle else 0)
        if self._beats is not None:
            self._beats.hand_out()
        for datagram, _ in _datagrams(self._socket):
            for message in self._talk.hear(datagram) or ():
                self._heed(understood(message))
        if wait is self._both:
            for key, _ in self._outputs.select(0):
                self._pass_on(key.data)

    def _heed(self, message: tuple[int, int, bytes] | dict[str, Any]) -> None:
        if isinstance(message, tuple):
            return
        self._asked_to_end = self._asked_to_end or "end" in message
        self._asked += [message["signal"]] if "signal" in message else []

    def _pass_on(self, rank: HostedRank, most: int = 1) -> None:
        """Say what a rank has printed, in at most so many messages of each file."""
        for descriptor, file in [*rank.files.items()]:
            for _ in range(most):
                try:
                    data = os.read(descriptor, MOST_BYTES - _OUTPUT.size)
                except BlockingIOError:
                    break
                if not data:
                    self._outputs.unregister(descriptor)
                    del rank.files[descriptor]
                    break
                self._talk.send(output(file, rank.number, data))

    def _forget(self, rank: HostedRank) -> None:
        self._events.unregister(rank.ended)
        for descriptor in rank.files:
            self._outputs.unregister(descriptor)
        rank.close()
        del self._ranks[rank.number]


def main() -> int:
    """Take the order, run the ranks, and tell the head how each rank ended.

    On return no process of the ranks runs any more.
    """
    order = _take_order()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the ranks become children of this process
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)  # the head says when to end, or falls silent
    try:
        agent = Agent(order)
        agent.meet()
        try:
            agent.run()
        finally:
            agent.kill()
            _kill_descendants()
        agent.leave()
    except Lost as error:
        _say(f"ecrm: host {order['host']}: the head machine is lost, {error}: ranks killed")
        return 1
    except OSError as error:
        head = order["head"][0]
        _say(f"ecrm: host {order['host']}: cannot reach the head machine at {head}: {error}")
        return 1
    return 0


def _take_order() -> dict[str, Any]:
    signal.alarm(int(START_SECONDS))
    order: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    signal.alarm(0)
    return order


_prctl = ctypes.CDLL(None).prctl


def _as_rank() -> None:
    """In a child just forked: end with the agent, and take signals again."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)


def _kill_descendants() -> None:
    """SIGKILL and collect every process under this process, until none is left or 5 s are over.

    Dying processes may be left: the system is taking their memory back.
    """
    deadline = time.monotonic() + _DYING_SECONDS
    while time.monotonic() < deadline:
        alive = _kill(pid for pids in _families().values() for pid in pids)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if not alive:
            return
        time.sleep(0.005)


def _kill(pids: Iterable[int]) -> bool:
    """SIGKILL processes; return whether there were any."""
    found = False
    for pid in pids:
        found = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def _left_of(rank: int) -> set[int]:
    """The processes left by an ended rank: what has the rank's number in its variables.

    A process without the variable is killed at the end of the agent.
    """
    mark = f"{RANK}={rank}".encode()
    left: set[int] = set()
    for child, family in _families().items():
        with contextlib.suppress(OSError):
            with open(f"/proc/{child}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    left |= family
    return left


def _families() -> dict[int, set[int]]:
    """The living processes under each child of this process, without dying processes."""
    children: dict[int, list[int]] = {}
    dying: set[int] = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{entry}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry))
                if int(fields[6]) & _PF_EXITING:
                    dying.add(int(entry))
    families = {}
    for child in children.get(os.getpid(), []):
        found, left = {child}, [child]
        while left:
            new = children.get(left.pop(), [])
            found.update(new)
            left += new
        families[child] = found - dying
    return families


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, line.encode() + b"\n")


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)

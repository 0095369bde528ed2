"""The remote side of a rank's keep-alive connection.

The agent starts the rank, and kills the rank when the head machine falls silent. The agent runs on
the rank's host by its path alone (`python -I -S .../remote_agent.py`), and therefore imports only
the standard library and needs neither a current folder nor variables. The order comes as a line of
JSON on standard input, out of sight of other users: the head's address, the token to show to the
head, and the rank's command, folder and variables.

The agent kills the rank when the head is not heard, or does not hear, before the head gives the
rank up (see Link). A host that was only cut off therefore comes back without the rank. A rank
stopped for the keep-alive time is killed; when the agent itself is stopped, the rank's guard kills
the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any

START_SECONDS = 30.0  # for the starter, the order and the connection
BEAT = 0.05  # of the keep-alive time, between two signs of life
# of the keep-alive time, without a sign: the sides differ by more than a beat
PATIENCE = {"agent": 0.7, "head": 0.9}
# patience of the rank's guard with a stopped agent, passed by the variable
GUARD_PATIENCE, GUARDS_SHARE = "ECRM_AGENT_SECONDS", 0.6
# signals from mpirun to the rank
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_PF_EXITING = 0x4  # of the flags in proc_pid_stat(5)
_LONGEST_LINE = 1 << 16  # bytes of a line


class Lost(Exception):
    """The other side of a connection is gone or silent; the message says which."""


class Link:
    """One end of a keep-alive connection.

    The sides send JSON, a line each: objects are messages, lists are signs of life. A sign of life
    is [its number, the number of the last sign received]. From the numbers the agent knows the last
    of its signs heard by the head, whichever way the connection is cut. A side gives up PATIENCE
    after the last bytes received. The agent also gives up PATIENCE after sending the last sign
    heard by the head, earlier than the head, whose PATIENCE is longer.
    """

    def __init__(self, connection: socket.socket, keep_alive: float, side: str) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._beat, self._patience = BEAT * keep_alive, PATIENCE[side] * keep_alive
        self._heard = self._known_heard = time.monotonic()
        self._side = side
        self._sent: dict[int, float] = {}
        self._number = self._last = 0
        self._next_beat = 0.0
        self._unread = b""

    def fileno(self) -> int:
        """The socket's descriptor, for select."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send an object; raise Lost if the connection is broken."""
        self._write(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages received.

        Raises Lost when the other side has closed, or has said or heard nothing for too long.
        """
        messages = []
        try:
            while received := self._socket.recv(4096):
                self._heard = time.monotonic()
                *lines, self._unread = (self._unread + received).split(b"\n")
                messages += [
                    message for line in lines if (message := self._understand(line)) is not None
                ]
            if not messages:
                raise Lost("the connection was closed")
        except BlockingIOError:
            pass
        except OSError as error:
            raise Lost(f"the connection broke: {error.strerror}") from None
        if len(self._unread) > _LONGEST_LINE:
            raise Lost("what came is no message")
        now = time.monotonic()
        if now - self._heard > self._patience:
            raise Lost(f"nothing was heard for {now - self._heard:.1f} s")
        if self._side == "agent" and now - self._known_heard > self._patience:
            raise Lost(f"it has heard nothing for {now - self._known_heard:.1f} s")
        return messages

    def beat(self) -> float:
        """Send a sign of life if due; return the seconds until the next action."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._number += 1
            self._sent[self._number] = now
            self._write(b"[%d, %d]\n" % (self._number, self._last))
            self._next_beat = now + self._beat
        until = min(self._heard, self._known_heard) if self._side == "agent" else self._heard
        return max(min(self._next_beat, until + self._patience + 0.001) - now, 0.001)

    def _understand(self, line: bytes) -> dict[str, Any] | None:
        """The object on a line, `None` for a sign of life."""
        try:
            said = json.loads(line)
            if isinstance(said, dict):
                return said
            self._last, heard = map(int, said)
        except (ValueError, TypeError):
            raise Lost("what came is no message") from None
        self._known_heard = self._sent.get(heard, self._known_heard)
        self._sent = {number: at for number, at in self._sent.items() if number > heard}
        return None

    def finish(self) -> None:
        """Close; everything sent has arrived, or the other side is lost."""
        with contextlib.suppress(OSError, Lost):
            self._socket.shutdown(socket.SHUT_WR)
            while True:  # closing with unread data would drop sent data still on the way
                select.select([self], [], [], self._beat)
                self.receive()
        self._socket.close()

    def _write(self, line: bytes) -> None:
        try:
            self._socket.send(line)
        except BlockingIOError:
            pass  # the buffer is full of unread data: the silence will tell
        except OSError as error:
            raise Lost(f"the connection broke: {error.strerror}") from None


def main() -> int:
    """Take the order, run the rank, and tell the head how the rank ended.

    On return no process of the rank runs any more.
    """
    order = _take_order()
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the rank become children of this process
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)  # the head says when to end, or falls silent
    try:
        with socket.create_connection(tuple(order["head"]), timeout=START_SECONDS) as connection:
            link = Link(connection, order["keep_alive"], "agent")
            link.send(token=order["token"])
            try:
                end = _run(order, link, lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
            finally:
                _kill_descendants()
            link.send(**end)
            link.finish()
    except Lost as error:
        _say(f"ecrm: host {order['host']}: the head machine is lost, {error}: rank killed")
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


def _run(order: dict[str, Any], link: Link, before_start: Any) -> dict[str, Any]:
    """Start the rank and wait for its end; return the message for the head.

    Raises Lost when the head is lost.
    """

    def in_child() -> None:
        before_start()
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_DFL)

    try:
        os.chdir(order["folder"])
        rank = subprocess.Popen(
            order["command"],
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                **order["variables"],
                GUARD_PATIENCE: str(GUARDS_SHARE * order["keep_alive"]),
            },
            preexec_fn=in_child,
        )
    except OSError as error:
        return {"error": f"{error.filename}: {error.strerror}"}
    ended = os.pidfd_open(rank.pid)
    stopped_since: float | None = None
    watched: list[Link | int] = [link, ended]
    try:
        while True:
            ready, _, _ = select.select(watched, [], [], link.beat())
            if ended in ready:
                code = rank.wait()
                return {"signal": -code} if code < 0 else {"exit": code}
            for message in link.receive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, message["signal"])
            with contextlib.suppress(ChildProcessError):  # Linux's error for an ended rank
                change_of = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
                while change := os.waitid(os.P_PID, rank.pid, change_of):
                    stopped_since = time.monotonic() if change.si_code == os.CLD_STOPPED else None
            if stopped_since is not None and time.monotonic() - stopped_since > order["keep_alive"]:
                rank.kill()
    finally:
        os.close(ended)


def _kill_descendants() -> None:
    """SIGKILL and collect every process under this process, until none is left or 5 s are over.

    Dying processes may be left: the system is taking their memory back.
    """
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        alive = _descendants(os.getpid())
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if not alive:
            return
        time.sleep(0.005)


def _descendants(ancestor: int) -> set[int]:
    """The pids of all processes under `ancestor` that are not dying."""
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
    found: set[int] = set()
    left = [ancestor]
    while left:
        new = children.get(left.pop(), [])
        found.update(new)
        left += new
    return found - dying


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, line.encode() + b"\n")


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)

"""Hosts that do not hear each other, with real connections and processes."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from ecrm.process import remote_agent
from support.imitated_hosts import imitated, why_not

KEEP_ALIVE = 2.0

WATCHER = """
import socket, subprocess, sys, time
from ecrm.process.remote_agent import Unacknowledged
head, port, nobody, mine = sys.argv[1:]
heard = f"s = socket.create_connection(({head!r}, {port})); s.sendall(b'x'); s.close()"
connect = f"import socket; {heard}; socket.create_connection(({nobody!r}, 1))"
child = subprocess.Popen([sys.executable, "-c", connect])
own = socket.socket()
own.setblocking(False)
own.connect_ex((mine, 1))
unacknowledged, until = Unacknowledged(0.5), time.monotonic() + 10
while not (found := unacknowledged.look()) and time.monotonic() < until:
    time.sleep(0.02)
repeating = {to for _, _, to in unacknowledged._repeating.values()}
print(found, sorted(repeating))
child.kill()
child.wait()
time.sleep(0.5)
print(unacknowledged.look())
"""


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_an_agent_sees_what_its_rank_sends_in_vain():
    """Not what is acknowledged, nor what others send."""
    with imitated(3) as hosts:
        hosts.part("h1", "h2")
        hosts.part("h1", "h3")
        program = ["ip", "netns", "exec", hosts.namespace("h1"), sys.executable, "-c", WATCHER]
        with socket.create_server((hosts.head, 0)) as server:
            port = str(server.getsockname()[1])
            words = [*program, hosts.head, port, hosts.address("h2"), hosts.address("h3")]
            began = time.monotonic()
            done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        both = sorted([hosts.address("h2"), hosts.address("h3")])
        assert done.stdout == f"{[hosts.address('h2')]} {both}\n[]\n", done.stderr
        assert time.monotonic() - began > 1.5  # the first SYN is repeated after 1 s


class Slow:
    """A link that takes its time to look for messages, of which there are none."""

    def __init__(self, file: int) -> None:
        self._file = file

    def fileno(self) -> int:
        return self._file

    def beat(self) -> float:
        return 0.0

    def receive(self) -> list:
        time.sleep(0.5)
        return []


def test_a_rank_that_ends_while_its_agent_is_busy_has_ended(tmp_path, monkeypatch):
    """Linux says that it is no child, which the agent took for the loss of the head machine."""
    monkeypatch.chdir(tmp_path)
    order = {
        "folder": str(tmp_path),
        "command": ["sh", "-c", "sleep 0.1; exit 3"],
        "variables": {},
        "keep_alive": KEEP_ALIVE,
    }
    (tmp_path / "link").touch()
    with open(tmp_path / "link") as file:
        assert remote_agent._run(order, Slow(file.fileno()), lambda: None) == {"exit": 3}

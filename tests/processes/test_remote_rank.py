"""A rank on another host, its agent and its client, as real processes that hang or die."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ecrm.launch.remote_rank import AT_ONCE, RemoteRank
from ecrm.process import remote_agent
from ecrm.process.preflight import JOB_FOLDER
from support.drilling import is_running
from support.paths import PROGRAMS
from support.remote_ranks import KEEP_ALIVE, NO_SHELL, SHELL, starting_clients


@pytest.fixture
def reach(tmp_path):
    with starting_clients(tmp_path) as start:
        yield start


def until(condition: Callable[[], object], seconds: float = 20) -> float:
    """Wait until the condition holds; returns how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it never came to that"
        time.sleep(0.01)
    return time.monotonic() - began


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


RANK = (
    "import os, sys, time; open(sys.argv[1] + '.new', 'w').write(f'{os.getpid()} {os.getppid()}'); "
    "os.rename(sys.argv[1] + '.new', sys.argv[1]); time.sleep(100)"
)
RANKS = 17


@pytest.mark.parametrize("turns", [True, False])
def test_ranks_of_a_host_are_started_in_turn_and_those_that_are_dropped_again(
    reach, tmp_path, turns
):
    """Sixteen ranks on one host, whose sshd drops those that log in beyond ten at once.

    Without turns, beyond four.
    """
    log, most = tmp_path / "log", 10 if turns else 4
    log.mkdir()
    starter = f"{sys.executable} {PROGRAMS / 'dropping_ssh.py'} {log} {most} env X={{host}}"
    variables = {
        "OMPI_COMM_WORLD_SIZE": str(RANKS),
        **({JOB_FOLDER: str(tmp_path)} if turns else {}),
    }
    clients = [
        reach("echo", "well", starter=starter, PMIX_RANK=str(rank), **variables)
        for rank in range(1, RANKS)
    ]
    ended = [(*client.communicate(timeout=60), client.returncode) for client in clients]
    assert [(output, code) for output, _, code in ended] == [("well\n", 0)] * len(clients), ended
    under_way = [int(file.read_text()) for file in log.glob("began-*")]
    told = [
        line for _, errors, _ in ended for line in errors.splitlines() if "trying again" in line
    ]
    if turns:
        assert max(under_way) < AT_ONCE and len(under_way) == len(clients) and not told
    else:
        assert max(under_way) >= most and len(told) == len(under_way) - len(clients) > 0
        assert "ecrm: host there: the starter ended with 255, trying again (2 of 5)" in told


def test_a_host_that_drops_every_connection_is_given_up(reach, tmp_path):
    starter = f"{sys.executable} {PROGRAMS / 'dropping_ssh.py'} {tmp_path} 0 {{host}}"
    client = reach("true", starter=starter, constant="reach.PAUSES = (0.1, 0.2, 0.3, 0.4)")
    _, errors = client.communicate(timeout=40)
    assert client.returncode == -signal.SIGKILL and len(list(tmp_path.glob("began-*"))) == 5
    assert [line for line in errors.splitlines() if line.startswith("ecrm: ")] == [
        *(
            f"ecrm: host there: the starter ended with 255, trying again ({number} of 5)"
            for number in range(2, 6)
        ),
        f"ecrm: host there: rank 1 is given up: the starter ended with 255: "
        f"{starter.format(host='there')} {sys.executable} -I -S {remote_agent.__file__}",
    ]


def test_a_turn_that_does_not_come_is_given_up(reach, tmp_path):
    """Somebody else holds its lock."""
    with open(tmp_path / "ecrm-start-there-0", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        client = reach("true", constant="reach.START_SECONDS = 1", **{JOB_FOLDER: str(tmp_path)})
        _, errors = client.communicate(timeout=30)
    said = "its turn to be started did not come within 1 s"
    assert errors == f"ecrm: host there: rank 1 is given up: {said}\n"


def rank_and_agent(path: Path) -> tuple[int, int]:
    until(path.exists)
    rank, its_agent = map(int, path.read_text().split())
    return rank, its_agent


@pytest.mark.parametrize("starter", [NO_SHELL, SHELL])
def test_a_rank_gets_its_words_folder_and_variables_and_gives_its_output_and_code(reach, starter):
    words = ["it's", 'a "b" $HOME `id`', "", "*", "line\nbreak", "ü"]
    program = (
        "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), "
        "os.environ['OMPI_ODD'], os.environ['ECRM_HOST'], sys.stdin.read()])); "
        "print('wrong', file=sys.stderr); sys.exit(7)"
    )
    client = reach(sys.executable, "-c", program, *words, starter=starter, OMPI_ODD="a 'b' $c\n")
    output, errors = client.communicate(timeout=30)
    assert json.loads(output) == [words, os.getcwd(), "a 'b' $c\n", "there", ""]
    assert (errors, client.returncode) == ("wrong\n", 7)


def test_a_rank_that_is_killed_is_a_client_that_is(reach):
    client = reach("sh", "-c", "echo last words; kill -9 $$")
    output, errors = client.communicate(timeout=30)
    assert (output, errors, client.returncode) == ("last words\n", "", -signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_passed_on_and_to_the_rank_alone(reach, tmp_path, number):
    program = (
        f"trap 'echo caught; exit 5' {number.name[3:]}; touch $0; while :; do sleep 0.05; done"
    )
    client = reach("sh", "-c", program, str(tmp_path / "up"))
    until((tmp_path / "up").exists)
    client.send_signal(number)
    output, _ = client.communicate(timeout=30)
    assert (output, client.returncode) == ("caught\n", 5)


@pytest.mark.parametrize(
    ("starter", "command", "said"),
    [
        ("false {host}", ["true"], "the starter ended with 1: false there"),
        (
            "no-such-program {host}",
            ["true"],
            "cannot run the starter no-such-program: No such file",
        ),
        (
            NO_SHELL,
            ["/no/such/program"],
            "cannot start the rank there: /no/such/program: No such file",
        ),
    ],
)
def test_a_rank_that_cannot_be_started_is_told_and_given_up(reach, starter, command, said):
    client = reach(*command, starter=starter)
    _, errors = client.communicate(timeout=30)
    assert (
        said in errors
        and errors.startswith("ecrm: host there: rank 1 is given up: ")
        and "Traceback" not in errors
    )
    assert client.returncode == -signal.SIGKILL


def test_a_host_that_falls_silent_is_given_up(reach, tmp_path):
    """The agent is stopped: the connection stays open and silent, like that of a cut cable."""
    client = reach(sys.executable, "-c", RANK, str(tmp_path / "rank"))
    rank, its_agent = rank_and_agent(tmp_path / "rank")
    os.kill(its_agent, signal.SIGSTOP)
    began = time.monotonic()
    _, errors = client.communicate(timeout=30)
    assert 0.7 * KEEP_ALIVE < time.monotonic() - began < KEEP_ALIVE + 1
    assert client.returncode == -signal.SIGKILL
    assert "ecrm: host there: rank 1 is given up: nothing was heard for 0.9 s" in errors
    until(lambda: not is_running(rank))


def test_a_head_that_falls_silent_has_its_rank_killed(reach, tmp_path):
    client = reach(sys.executable, "-c", RANK, str(tmp_path / "rank"))
    rank, its_agent = rank_and_agent(tmp_path / "rank")
    os.kill(client.pid, signal.SIGSTOP)
    assert 0.5 * KEEP_ALIVE < until(lambda: not is_running(rank)) < KEEP_ALIVE + 1
    until(lambda: not is_running(its_agent))


def test_the_agent_gives_up_before_the_head_does():
    """A host that is cut off has killed its ranks when the others go on without them."""
    assert remote_agent.PATIENCE["agent"] + remote_agent.BEAT < remote_agent.PATIENCE["head"] < 1


def test_an_agent_that_is_not_heard_gives_up_before_the_head_does():
    """The link is cut one way only: the agent hears the head go on, but the head hears nothing."""
    ours, theirs = socket.socketpair()
    link = remote_agent.Link(Pipe(ours), KEEP_ALIVE, "agent")
    began, last, number = time.monotonic(), 0, 0
    with pytest.raises(remote_agent.Lost, match="it has heard nothing for 0.7 s"):
        while True:
            link.beat()
            if time.monotonic() - began < 0.5:
                last = json.loads(theirs.recv(4096).splitlines()[-1])[0]
                heard = time.monotonic()
            number += 1
            theirs.sendall(b"[%d, %d]\n" % (number, last))
            link.receive()
            time.sleep(0.06)
    assert time.monotonic() - heard < remote_agent.PATIENCE["head"] * KEEP_ALIVE


def test_nonsense_on_the_connection_is_a_lost_one():
    for nonsense in (b"nonsense\n", b"5\n", b"[1]\n", b'["a", 1]\n', b"\xff\n", b"x" * 100_000):
        ours, theirs = socket.socketpair()
        link = remote_agent.Link(Pipe(ours), KEEP_ALIVE, "head")
        threading.Thread(target=theirs.sendall, args=(nonsense,)).start()
        with pytest.raises(remote_agent.Lost, match="no message"):
            until(link.receive, 5)


class Pipe:
    """One end of a pair of sockets, which have no TCP to be told of."""

    def __init__(self, end: socket.socket) -> None:
        self.recv, self.send, self.setblocking = end.recv, end.send, end.setblocking

    def setsockopt(self, *_: object) -> None:
        """There is nothing to set."""


IMPOSTOR = """
import json, socket, sys, time
order = json.loads(sys.stdin.readline())
with socket.create_connection(order["head"]) as head:
    token = json.dumps({"token": order["token"]}).encode()
    head.sendall(token + b"\\n" + sys.argv[1].encode() + b"\\n")
    time.sleep(100)
"""


@pytest.mark.parametrize("said", ["nonsense", "5", '{"exit": "3"}', "{}"])
def test_a_client_that_hears_nonsense_is_a_rank_that_is_killed(reach, tmp_path, said):
    """An exit of its own would not be noticed: the other ranks would wait for ever."""
    (tmp_path / "impostor.py").write_text(IMPOSTOR)
    client = reach(
        "true", starter=f"{sys.executable} {tmp_path}/impostor.py {shlex.quote(said)} {{host}}"
    )
    _, errors = client.communicate(timeout=30)
    assert client.returncode == -signal.SIGKILL
    assert errors == "ecrm: host there: rank 1 is given up: what came is no message\n"


def client_line(folder: Path) -> list[str]:
    """How mpirun starts a client for the only host."""
    (folder / "hosts").write_text("here\n")
    hosts = ["--hosts", str(folder / "hosts"), "--head", "127.0.0.1"]
    return [sys.executable, "-m", "ecrm.launch.remote_rank", *hosts]


def test_a_client_that_fails_itself_is_a_rank_that_is_killed_and_ends_a_run_not_begun(tmp_path):
    line = client_line(tmp_path)
    (tmp_path / "begun").write_text('{"launch": null}')
    (tmp_path / "before").write_text('{"launch": "an earlier one in this folder"}')
    for begun, ended in (
        (tmp_path / "begun", 0),
        (tmp_path / "before", -signal.SIGTERM),
        (tmp_path / "nothing", -signal.SIGTERM),
    ):
        words = [*line, "--starter", NO_SHELL, "--begun", str(begun), "--", "true"]
        program = (
            "import subprocess, sys, time; "
            f"print(subprocess.run({words!r}).returncode, flush=True); time.sleep(0.5)"
        )
        environ = {**os.environ, "PMIX_RANK": "not a number", "OMPI_COMM_WORLD_SIZE": "1"}
        mpirun = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=30
        )
        assert mpirun.stderr.startswith(
            "ecrm: error: ValueError in the client of rank not a number: "
        )
        assert mpirun.stderr.count("\n") == 1
        assert mpirun.returncode == ended
        assert mpirun.stdout in ("", f"{-signal.SIGKILL}\n")


def test_a_starter_that_cannot_be_killed_is_left_to_itself(monkeypatch):
    """As one that runs as another user, by sudo."""

    def refuse(*_: object) -> None:
        raise PermissionError

    with subprocess.Popen(["sleep", "100"], process_group=0) as starter:
        client = RemoteRank.__new__(RemoteRank)
        client._process = starter
        monkeypatch.setattr(os, "killpg", refuse)
        client.leave(0)
        starter.kill()


def test_a_rank_that_stands_stopped_is_killed(reach, tmp_path):
    """It is a guard, and its own rank may be stopped too. The head still hears the agent."""
    client = reach(sys.executable, "-c", RANK, str(tmp_path / "rank"))
    rank, _ = rank_and_agent(tmp_path / "rank")
    for number, seconds in ((signal.SIGSTOP, 0.6), (signal.SIGCONT, 0.1), (signal.SIGSTOP, 0.6)):
        os.kill(rank, number)
        time.sleep(seconds)
    assert is_running(rank)
    client.communicate(timeout=30)
    assert client.returncode == -signal.SIGKILL and not is_running(rank)


@pytest.mark.parametrize("which", ["client", "agent"])
def test_a_rank_does_not_outlive_its_client_or_its_agent(reach, tmp_path, which):
    client = reach(sys.executable, "-c", RANK, str(tmp_path / "rank"))
    rank, its_agent = rank_and_agent(tmp_path / "rank")
    os.kill(client.pid if which == "client" else its_agent, signal.SIGKILL)
    client.communicate(timeout=30)
    assert client.returncode == -signal.SIGKILL
    until(lambda: not is_running(rank) and not is_running(its_agent))


def test_a_client_whose_mpirun_is_gone_ends(tmp_path):
    line = client_line(tmp_path)
    line += ["--starter", NO_SHELL, "--", sys.executable, "-c", RANK, str(tmp_path / "rank")]
    program = (
        f"import subprocess, time; print(subprocess.Popen({line!r}).pid, flush=True); "
        "time.sleep(100)"
    )
    environ = {**os.environ, "PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    mpirun = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environ
    )
    client = int(mpirun.stdout.readline())
    rank, its_agent = rank_and_agent(tmp_path / "rank")
    mpirun.kill()
    mpirun.communicate()
    until(lambda: not any(map(is_running, (client, rank, its_agent))))


def test_what_a_rank_has_started_ends_with_it(reach, tmp_path):
    """Also a process that has left its session and its parent."""
    program = (
        "import os, subprocess, sys\n"
        "p = subprocess.Popen(['setsid', 'sleep', '100'], "
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "open(sys.argv[1], 'w').write(str(p.pid))\n"
    )
    client = reach(sys.executable, "-c", program, str(tmp_path / "left"))
    client.communicate(timeout=30)
    assert client.returncode == 0
    assert not is_running(int((tmp_path / "left").read_text()))


def test_a_stranger_is_sent_away(reach, tmp_path):
    """Silent clients, wrong tokens and nonsense are sent away before the agent comes.

    The agent is still accepted afterwards.
    """
    go = tmp_path / "go"
    client = reach(
        "echo",
        "well",
        starter=f"sh -c 'while ! [ -e {go} ]; do sleep 0.05; done; exec {{command}}' {{host}}",
    )
    port = 0

    def listening() -> bool:
        nonlocal port
        port = _listening_port(client.pid)
        return port != 0

    until(listening)
    silent = socket.create_connection(("127.0.0.1", port))
    for line in (
        b'{"token": "' + b"0" * 64 + b'"}\n',
        b"GET / HTTP/1.0\r\n\r\n",
        b'{"token": 5}\n',
        b"[]\n",
        b"\xff" * 300,
    ):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.settimeout(20)
            stranger.sendall(line)
            assert _closed(stranger)
    go.touch()
    output, errors = client.communicate(timeout=30)
    assert (output, errors, client.returncode) == ("well\n", "", 0)
    silent.close()


def _closed(connection: socket.socket) -> bool:
    """Whether the other side closes without a word."""
    try:
        return connection.recv(10) == b""
    except ConnectionResetError:
        return True


def _listening_port(pid: int) -> int:
    """The port that a process listens at; 0 if none."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in inodes:
            return int(words[1].rpartition(":")[2], 16)
    return 0

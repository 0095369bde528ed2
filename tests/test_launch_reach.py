"""A rank on another host, its agent and its client as real processes on this machine; each may fall silent or die."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from drilling import is_running

from ecrm.launch import agent

KEEP_ALIVE = 1.0
NO_SHELL, SHELL = "env X={host}", "sh -c {command} {host}"


@pytest.fixture
def reach(tmp_path):
    """Starts a client as mpirun would, rank 1 of 2 on host `there`."""
    hosts = tmp_path / "hosts"
    hosts.write_text("here\nthere\n")
    clients = []

    def start(*command: str, starter: str = NO_SHELL, keep_alive: float = KEEP_ALIVE, **variables: str) -> subprocess.Popen:
        line = [sys.executable, "-m", "ecrm.launch.reach", "--hosts", str(hosts), "--head", "127.0.0.1"]
        line += ["--keep-alive", str(keep_alive), "--starter", starter, "--", *command]
        environ = {**os.environ, "PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", **variables}
        clients.append(
            subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
        )
        return clients[-1]

    yield start
    for client in clients:
        client.kill()
        client.communicate(timeout=20)


def until(condition: Callable[[], object], seconds: float = 20) -> float:
    """Wait until the condition holds; returns how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it never came to that"
        time.sleep(0.01)
    return time.monotonic() - began


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


RANK = "import os, sys, time; open(sys.argv[1] + '.new', 'w').write(f'{os.getpid()} {os.getppid()}'); os.rename(sys.argv[1] + '.new', sys.argv[1]); time.sleep(100)"


def rank_and_agent(path: Path) -> tuple[int, int]:
    until(path.exists)
    rank, its_agent = map(int, path.read_text().split())
    return rank, its_agent


@pytest.mark.parametrize("starter", [NO_SHELL, SHELL])
def test_a_rank_gets_its_words_folder_and_variables_and_gives_its_output_and_code(reach, starter):
    words = ["it's", 'a "b" $HOME `id`', "", "*", "line\nbreak", "ü"]
    program = (
        "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), os.environ['OMPI_ODD'], os.environ['ECRM_HOST'], sys.stdin.read()])); "
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
    program = f"trap 'echo caught; exit 5' {number.name[3:]}; touch $0; while :; do sleep 0.05; done"
    client = reach("sh", "-c", program, str(tmp_path / "up"))
    until((tmp_path / "up").exists)
    client.send_signal(number)
    output, _ = client.communicate(timeout=30)
    assert (output, client.returncode) == ("caught\n", 5)


@pytest.mark.parametrize(
    ("starter", "command", "said"),
    [
        ("false {host}", ["true"], "the starter ended with 1: false there"),
        ("no-such-program {host}", ["true"], "cannot run the starter no-such-program: No such file"),
        (NO_SHELL, ["/no/such/program"], "cannot start the rank there: /no/such/program: No such file"),
    ],
)
def test_a_rank_that_cannot_be_started_is_told_and_given_up(reach, starter, command, said):
    client = reach(*command, starter=starter)
    _, errors = client.communicate(timeout=30)
    assert said in errors and errors.startswith("ecrm: host there: rank 1 is given up: ") and "Traceback" not in errors
    assert client.returncode == -signal.SIGKILL


def test_a_host_that_falls_silent_is_given_up(reach, tmp_path):
    """The agent is stopped, so that the connection stays open and says nothing: what a cut cable looks like."""
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
    """So that a host cut off has killed its ranks when the others go on without them, beats on their way and all."""
    assert agent.PATIENCE["agent"] + agent.BEAT < agent.PATIENCE["head"] < 1


@pytest.mark.parametrize("which", ["client", "agent"])
def test_a_rank_does_not_outlive_its_client_or_its_agent(reach, tmp_path, which):
    client = reach(sys.executable, "-c", RANK, str(tmp_path / "rank"))
    rank, its_agent = rank_and_agent(tmp_path / "rank")
    os.kill(client.pid if which == "client" else its_agent, signal.SIGKILL)
    client.communicate(timeout=30)
    assert client.returncode == -signal.SIGKILL
    until(lambda: not is_running(rank) and not is_running(its_agent))


def test_a_client_whose_mpirun_is_gone_ends(tmp_path):
    (tmp_path / "hosts").write_text("here\n")
    line = [sys.executable, "-m", "ecrm.launch.reach", "--hosts", str(tmp_path / "hosts"), "--head", "127.0.0.1"]
    line += ["--starter", NO_SHELL, "--", sys.executable, "-c", RANK, str(tmp_path / "rank")]
    program = f"import subprocess, time; print(subprocess.Popen({line!r}).pid, flush=True); time.sleep(100)"
    environ = {**os.environ, "PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    mpirun = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environ)
    client = int(mpirun.stdout.readline())
    rank, its_agent = rank_and_agent(tmp_path / "rank")
    mpirun.kill()
    mpirun.communicate()
    until(lambda: not any(map(is_running, (client, rank, its_agent))))


def test_what_a_rank_has_started_ends_with_it(reach, tmp_path):
    """Also a process that has left its session and its parent."""
    program = (
        "import os, subprocess, sys\n"
        "p = subprocess.Popen(['setsid', 'sleep', '100'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "open(sys.argv[1], 'w').write(str(p.pid))\n"
    )
    client = reach(sys.executable, "-c", program, str(tmp_path / "left"))
    client.communicate(timeout=30)
    assert client.returncode == 0
    assert not is_running(int((tmp_path / "left").read_text()))


def test_a_stranger_is_sent_away(reach, tmp_path):
    """One who says nothing, one with a wrong token, one who talks nonsense: before the agent comes, and it still may."""
    go = tmp_path / "go"
    client = reach("echo", "well", starter=f"sh -c 'while ! [ -e {go} ]; do sleep 0.05; done; exec {{command}}' {{host}}")
    port = 0

    def listening() -> bool:
        nonlocal port
        port = _listening_port(client.pid)
        return port != 0

    until(listening)
    silent = socket.create_connection(("127.0.0.1", port))
    for line in (b'{"token": "' + b"0" * 64 + b'"}\n', b"GET / HTTP/1.0\r\n\r\n", b'{"token": 5}\n', b"[]\n", b"\xff" * 300):
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
        try:
            inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
        except OSError:
            pass
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in inodes:
            return int(words[1].rpartition(":")[2], 16)
    return 0

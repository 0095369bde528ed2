"""Ranks on another host, their agent and the process that watches them, which hang or die."""

from __future__ import annotations

import contextlib
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

from ecrm.launch.remote_host import RemoteHost
from ecrm.process import remote_agent
from ecrm.transport.membership import Head
from ecrm.transport.membership_socket import LINKS, HeadServer, Rendezvous
from support.drilling import is_running
from support.paths import PROGRAMS
from support.remote_runs import KEEP_ALIVE, NO_SHELL, SHELL, starting_runs


@pytest.fixture
def reach(tmp_path):
    with starting_runs(tmp_path) as start:
        yield start


def until(condition: Callable[[], object], seconds: float = 20) -> float:
    """Wait until the condition holds; returns how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it never came to that"
        time.sleep(0.01)
    return time.monotonic() - began


RANK = (
    "import os, sys, time; at = sys.argv[1] + os.environ['PMIX_RANK']; "
    "open(at + '.new', 'w').write(f'{os.getpid()} {os.getppid()}'); "
    "os.rename(at + '.new', at); time.sleep(100)"
)


def rank_and_agent(path: Path, rank: int = 0) -> tuple[int, int]:
    path = path.with_name(f"{path.name}{rank}")
    until(path.exists)
    pid, its_agent = map(int, path.read_text().split())
    return pid, its_agent


def test_one_starter_starts_all_ranks_of_a_host(reach, tmp_path):
    """One login and one agent, whose sshd drops a connection beyond one at once."""
    starter = f"{sys.executable} {PROGRAMS / 'dropping_ssh.py'} {tmp_path} 1 env X={{host}}"
    run = reach("sh", "-c", "echo well $PPID", ranks=30, starter=starter)
    output, errors = run.communicate(timeout=60)
    assert (errors, run.returncode) == ("", 0)
    lines = output.splitlines()
    assert len(lines) == 30 and len(set(lines)) == 1, "one parent"
    assert len([*tmp_path.glob("began-*")]) == 1


def test_a_connection_that_is_dropped_is_made_again(reach, tmp_path):
    """And the second agent alone starts the rank, if both have come through."""
    starter = f"sh -c 'mkdir {tmp_path}/first 2>/dev/null && exit 255; exec {{command}}' {{host}}"
    run = reach("echo", "well", starter=starter, constant="reach.PAUSES = (0.1, 0.2, 0.3, 0.4)")
    output, errors = run.communicate(timeout=30)
    assert (output, run.returncode) == ("well\n", 0)
    assert errors == "ecrm: host there: the starter ended with 255, trying again (2 of 5)\n"


def test_a_host_that_drops_every_connection_is_given_up(reach, tmp_path):
    starter = f"{sys.executable} {PROGRAMS / 'dropping_ssh.py'} {tmp_path} 0 {{host}}"
    run = reach("true", starter=starter, constant="reach.PAUSES = (0.1, 0.2, 0.3, 0.4)")
    _, errors = run.communicate(timeout=40)
    assert run.returncode == 1 and len(list(tmp_path.glob("began-*"))) == 5
    assert [line for line in errors.splitlines() if line.startswith("ecrm: ")] == [
        *(
            f"ecrm: host there: the starter ended with 255, trying again ({number} of 5)"
            for number in range(2, 6)
        ),
        f"ecrm: host there: rank 0 is given up: the starter ended with 255: "
        f"{starter.format(host='there')} {sys.executable} -I -S {remote_agent.__file__}",
    ]


@pytest.mark.parametrize("starter", [NO_SHELL, SHELL])
def test_a_rank_gets_its_words_folder_and_variables_and_gives_its_output_and_code(reach, starter):
    words = ["it's", 'a "b" $HOME `id`', "", "*", "line\nbreak", "ü"]
    program = (
        "import json, os, sys; of = os.environ; print(json.dumps([sys.argv[1:], os.getcwd(), "
        "of['ECRM_ODD'], of['ECRM_HOST'], of['OMPI_COMM_WORLD_SIZE'], sys.stdin.read()])); "
        "print('wrong', file=sys.stderr); sys.exit(7)"
    )
    run = reach(sys.executable, "-c", program, *words, starter=starter, ECRM_ODD="a 'b' $c\n")
    output, errors = run.communicate(timeout=30)
    assert json.loads(output) == [words, os.getcwd(), "a 'b' $c\n", "there", "1", ""]
    assert (errors, run.returncode) == ("wrong\n", 7)


def test_a_rank_that_is_killed_costs_itself_alone(reach):
    program = "if [ $PMIX_RANK = 1 ]; then echo last words; kill -9 $$; fi; sleep 0.5; echo well"
    run = reach("sh", "-c", program, ranks=3)
    output, errors = run.communicate(timeout=30)
    assert (output, errors, run.returncode) == ("last words\nwell\nwell\n", "", 0)


def test_a_run_of_which_no_rank_is_left_fails(reach):
    run = reach("sh", "-c", "kill -9 $$", ranks=2)
    assert (run.wait(30), run.stderr.read()) == (1, "")


def test_an_exit_with_an_error_ends_the_other_ranks_after_a_while(reach):
    program = "if [ $PMIX_RANK = 1 ]; then exit 4; fi; sleep 100"
    run = reach("sh", "-c", program, ranks=2, constant="run.OTHERS_SECONDS = 0.5")
    began = time.monotonic()
    assert run.wait(30) == 4
    assert 0.5 < time.monotonic() - began < 10


def test_a_host_that_wakes_after_it_was_given_up_is_not_told_of_again(reach, tmp_path):
    """Its agent has killed the ranks, and says so; a second host keeps the run going."""
    (tmp_path / "hosts").write_text("there\nhere\n")
    program = RANK.replace("sleep(100)", "sleep(8)")
    run = reach(sys.executable, "-c", program, str(tmp_path / "rank"), ranks=2)
    _, its_agent = rank_and_agent(tmp_path / "rank")
    rank_and_agent(tmp_path / "rank", 1)
    os.kill(its_agent, signal.SIGSTOP)
    said = run.stderr.readline()
    with contextlib.suppress(ProcessLookupError):  # with its starter
        os.kill(its_agent, signal.SIGCONT)
    _, errors = run.communicate(timeout=30)
    assert "host there: rank 0 is given up: nothing was heard for 0.9 s" in said
    assert (errors, run.returncode) == ("", 0)


@pytest.mark.parametrize("begun", [True, False])
def test_a_death_before_the_ranks_have_met_ends_the_run(reach, tmp_path, begun):
    mark = tmp_path / "ranks.json"
    mark.write_text(json.dumps({"launch": "this" if begun else "an earlier one"}))
    program = "if [ $PMIX_RANK = 1 ]; then kill -9 $$; fi; sleep 1; echo well"
    run = reach("sh", "-c", program, ranks=2, begun=mark, ECRM_LAUNCH="this")
    output, errors = run.communicate(timeout=30)
    said = "ecrm: host there: rank 1 died of signal 9; the run had not begun, and ends\n"
    assert (output, errors, run.returncode) == (("well\n", "", 0) if begun else ("", said, 1))


def test_the_head_of_the_run_is_told_of_a_death_at_once(reach):
    """Long before the lease of the rank is over."""
    head = Head(["there"] * 2, 60.0)
    server = HeadServer(head, bytes(16), b"secret", "127.0.0.1", print)
    rendezvous = Rendezvous(bytes(16), b"secret", server.place, 60.0)
    program = "if [ $PMIX_RANK = 1 ]; then kill -9 $$; fi; sleep 100"
    reach("sh", "-c", program, ranks=2, **{LINKS: rendezvous.text()})
    until(lambda: head.dead == {1}, 15)
    assert head.live == {0, 1} and head.fenced == {1}
    server.close()


def test_the_agent_carries_the_beats_of_its_ranks(reach):
    head = Head(["there"] * 2, KEEP_ALIVE)
    server = HeadServer(head, bytes(16), b"secret", "127.0.0.1", print)
    rendezvous = Rendezvous(bytes(16), b"secret", server.place, KEEP_ALIVE)
    sent: set[tuple[str, int]] = set()
    answer = server._answer_beats

    def answers(datagram, sender):
        beats = answer(datagram, sender)
        sent.update([sender] if beats else [])
        return beats

    server._answer_beats = answers
    run = reach(sys.executable, "-c", BEATS, ranks=2, **{LINKS: rendezvous.text()})
    assert run.communicate(timeout=30) == ("well\n" * 2, "")
    assert len(head._answered) == 2 and len(sent) == 1, "from the agent alone"
    server.close()


BEATS = """
import os, time
from ecrm.kernels.links import Identity, Settings
from ecrm.transport.carrier import Carrier
rank, address, port = int(os.environ["PMIX_RANK"]), *os.environ["ECRM_BEATS"].split(":")
carrier = Carrier(Identity(bytes(16), b"secret", rank), 2, Settings(), address)
carrier.lease(address, int(port), KEEP_ALIVE)
time.sleep(2 * KEEP_ALIVE)
print("well", flush=True)
""".replace("KEEP_ALIVE", str(KEEP_ALIVE))


def test_a_signal_is_passed_on_to_all_ranks(reach, tmp_path):
    program = (
        f"trap 'echo caught; exit 5' USR1; touch {tmp_path}/$PMIX_RANK.up; "
        "while :; do sleep 0.05; done"
    )
    run = reach("sh", "-c", program, ranks=2)
    until(lambda: len([*tmp_path.glob("*.up")]) == 2)
    run.send_signal(signal.SIGUSR1)
    output, _ = run.communicate(timeout=30)
    assert (output, run.returncode) == ("caught\ncaught\n", 5)


def test_sigterm_ends_all_ranks(reach, tmp_path):
    run = reach(sys.executable, "-c", RANK, str(tmp_path / "rank"), ranks=2, keep_alive=60.0)
    pids = [rank_and_agent(tmp_path / "rank", rank)[0] for rank in range(2)]
    run.send_signal(signal.SIGTERM)
    assert run.wait(10) == 1
    assert not any(map(is_running, pids))


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
    run = reach(*command, starter=starter)
    _, errors = run.communicate(timeout=30)
    assert (
        said in errors
        and errors.startswith("ecrm: host there: rank 0 is given up: ")
        and "Traceback" not in errors
    )
    assert run.returncode == 1


def test_a_host_that_falls_silent_is_given_up(reach, tmp_path):
    """The agent is stopped: silent, as behind a cut cable."""
    run = reach(sys.executable, "-c", RANK, str(tmp_path / "rank"), ranks=2)
    pid, its_agent = rank_and_agent(tmp_path / "rank")
    rank_and_agent(tmp_path / "rank", 1)
    os.kill(its_agent, signal.SIGSTOP)
    began = time.monotonic()
    _, errors = run.communicate(timeout=30)
    assert 0.7 * KEEP_ALIVE < time.monotonic() - began < KEEP_ALIVE + 1
    assert run.returncode == 1
    assert "ecrm: host there: ranks 0, 1 are given up: nothing was heard for 0.9 s" in errors
    until(lambda: not is_running(pid))


def test_a_head_that_falls_silent_has_its_ranks_killed(reach, tmp_path):
    run = reach(sys.executable, "-c", RANK, str(tmp_path / "rank"), ranks=2)
    pids = [rank_and_agent(tmp_path / "rank", rank)[0] for rank in range(2)]
    its_agent = rank_and_agent(tmp_path / "rank")[1]
    os.kill(run.pid, signal.SIGSTOP)
    assert 0.5 * KEEP_ALIVE < until(lambda: not any(map(is_running, pids))) < KEEP_ALIVE + 1
    until(lambda: not is_running(its_agent))
    os.kill(run.pid, signal.SIGCONT)
    assert "the head machine is lost" in run.communicate(timeout=30)[1]


IMPOSTOR = """
import importlib.util, json, socket, sys, time
found = importlib.util.spec_from_file_location("agent", sys.argv[1])
agent = importlib.util.module_from_spec(found)
found.loader.exec_module(agent)
order = json.loads(sys.stdin.readline())
talk = agent.Talk(bytes.fromhex(order["secret"]), "agent", 0, order["keep_alive"], 5)
talk.send(sys.argv[2].encode())
head = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
while True:
    for datagram in talk.due():
        head.sendto(datagram, tuple(order["head"]))
    time.sleep(0.02)
"""


@pytest.mark.parametrize(
    "said", ["nonsense", "5", '{"rank":0,"exit":"3"}', "{}", '{"rank":7,"exit":0}']
)
def test_an_agent_that_says_nonsense_is_a_host_that_is_given_up(reach, tmp_path, said):
    (tmp_path / "impostor.py").write_text(IMPOSTOR)
    starter = f"{sys.executable} {tmp_path}/impostor.py {remote_agent.__file__} '{said}' {{host}}"
    run = reach("true", starter=starter)
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 1
    assert errors == "ecrm: host there: rank 0 is given up: what came is no message\n"


def test_a_starter_that_cannot_be_killed_is_left_to_itself(monkeypatch):
    """As one that runs as another user, by sudo."""

    def refuse(*_: object) -> None:
        raise PermissionError

    with subprocess.Popen(["sleep", "100"], process_group=0) as starter:
        host = RemoteHost.__new__(RemoteHost)
        host._process = starter
        monkeypatch.setattr(os, "killpg", refuse)
        host.leave(0)
        starter.kill()


def test_a_rank_that_stands_stopped_is_killed(reach, tmp_path):
    """It is a guard, and its own rank may be stopped too. The head still hears the agent."""
    run = reach(sys.executable, "-c", RANK, str(tmp_path / "rank"))
    pid, _ = rank_and_agent(tmp_path / "rank")
    for number, seconds in ((signal.SIGSTOP, 0.6), (signal.SIGCONT, 0.1), (signal.SIGSTOP, 0.6)):
        os.kill(pid, number)
        time.sleep(seconds)
    assert is_running(pid)
    assert run.wait(30) == 1 and not is_running(pid)


@pytest.mark.parametrize("which", ["run", "agent"])
def test_a_rank_does_not_outlive_its_head_or_its_agent(reach, tmp_path, which):
    run = reach(sys.executable, "-c", RANK, str(tmp_path / "rank"))
    pid, its_agent = rank_and_agent(tmp_path / "rank")
    os.kill(run.pid if which == "run" else its_agent, signal.SIGKILL)
    assert run.wait(30) == (-signal.SIGKILL if which == "run" else 1)
    until(lambda: not is_running(pid) and not is_running(its_agent))


def test_a_run_whose_launch_is_gone_ends(tmp_path):
    (tmp_path / "hosts").write_text("here\n")
    line = [sys.executable, "-m", "ecrm.launch.remote_run", "--ranks", "1", "--head", "127.0.0.1"]
    line += ["--hosts", str(tmp_path / "hosts"), "--starter", NO_SHELL]
    line += ["--", sys.executable, "-c", RANK, str(tmp_path / "rank")]
    program = (
        f"import subprocess, time; print(subprocess.Popen({line!r}).pid, flush=True); "
        "time.sleep(100)"
    )
    launch = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    run = int(launch.stdout.readline())
    pid, its_agent = rank_and_agent(tmp_path / "rank")
    launch.kill()
    launch.communicate()
    until(lambda: not any(map(is_running, (run, pid, its_agent))))


def test_what_a_rank_has_started_ends_with_it_and_nothing_else_does(reach, tmp_path):
    """Also a process that has left its session and its parent."""
    program = (
        "import os, subprocess, sys, time\n"
        "p = subprocess.Popen(['setsid', 'sleep', '100'], "
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "at = sys.argv[1] + os.environ['PMIX_RANK']\n"
        "open(at + '.new', 'w').write(str(p.pid))\n"
        "os.rename(at + '.new', at)\n"
        "if os.environ['PMIX_RANK'] == '1':\n"
        "    time.sleep(100)\n"
    )
    run = reach(sys.executable, "-c", program, str(tmp_path / "left"), ranks=2)
    until(lambda: (tmp_path / "left0").exists() and (tmp_path / "left1").exists())
    ended, other = (int((tmp_path / f"left{rank}").read_text()) for rank in range(2))
    until(lambda: not is_running(ended))
    time.sleep(0.2)
    assert is_running(other) and run.poll() is None
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=30)
    assert not is_running(other)


def test_long_output_comes_whole_and_in_order(reach):
    """Two ranks, whose lines are not mixed."""
    program = (
        "import os; r = os.environ['PMIX_RANK']\n"
        "for n in range(3000): print(r, n, 'x' * 200, flush=n % 100 == 0)"
    )
    run = reach(sys.executable, "-c", program, ranks=2)
    output, errors = run.communicate(timeout=60)
    assert (errors, run.returncode) == ("", 0)
    for rank in "01":
        mine = [line for line in output.splitlines() if line[0] == rank]
        assert mine == [f"{rank} {n} {'x' * 200}" for n in range(3000)]


def test_a_terminal_that_nobody_reads_costs_no_rank(reach):
    """For longer than the keep-alive time: the ranks wait in their output, and are heard."""
    program = "print('y' * 79 + '\\n', end='', flush=True)\nfor n in range(40000): print('y' * 79)"
    run = reach(sys.executable, "-c", program)
    time.sleep(3 * KEEP_ALIVE)
    assert run.poll() is None
    output, errors = run.communicate(timeout=60)
    assert (len(output), errors, run.returncode) == (40001 * 80, "", 0)


def test_a_line_without_an_end_is_shown_after_a_moment(reach):
    run = reach("sh", "-c", "printf 'name: '; sleep 100")
    assert run.stdout.read(6) == "name: "
    run.send_signal(signal.SIGTERM)


def test_a_stranger_is_refused_and_told_of_once(reach, tmp_path):
    """Garbage, and datagrams of a talk with another secret."""
    run = reach(sys.executable, "-c", RANK, str(tmp_path / "rank"))
    rank_and_agent(tmp_path / "rank")
    port = _port(run.pid)
    other = remote_agent.Talk(b"another secret", "agent", 0, KEEP_ALIVE, 5)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for datagram in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 300, *other.due()) * 3:
            stranger.sendto(datagram, ("127.0.0.1", port))
    time.sleep(0.2)
    assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=30)
    assert errors == "ecrm: 127.0.0.1 is no host of this run: refused (told once)\n"


def test_a_flood_of_strangers_keeps_no_agent_from_its_answers(reach, tmp_path):
    """An agent without answers for 0.7 keep-alive times kills its ranks."""
    there = tmp_path / "there"
    run = reach("sh", "-c", f"touch {there}; sleep {3 * KEEP_ALIVE}; echo well")
    until(there.exists)
    port = _port(run.pid)
    flood = "import socket, sys\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n" + (
        "while True:\n    s.sendto(bytes(100), ('127.0.0.1', int(sys.argv[1])))"
    )
    stranger = subprocess.Popen([sys.executable, "-c", flood, str(port)])
    try:
        output, errors = run.communicate(timeout=60)
    finally:
        stranger.kill()
        stranger.wait()
    assert (output, run.returncode) == ("well\n", 0), errors


def test_a_starter_does_not_get_the_secret_of_the_run(reach):
    """srun hands its variables on: whoever sees the step would see the secret."""
    server = HeadServer(Head(["there"], 60.0), bytes(16), b"secret", "127.0.0.1", print)
    text = Rendezvous(bytes(16), b"secret", server.place, 60.0).text()
    starter = f"sh -c 'env | grep -c ^{LINKS}= >&2; exec env X={{host}} {{command}}'"
    counts = f"env | grep -c ^{LINKS}=; exit 5"
    try:
        run = reach("sh", "-c", counts, starter=starter, **{LINKS: text})
        output, errors = run.communicate(timeout=30)
    finally:
        server.close()
    assert (output, errors) == ("1\n", "0\n"), "the rank has it, the starter has not"


def _port(pid: int) -> int:
    """The port at which a process takes datagrams."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
    lines = [line.split() for line in Path("/proc/net/udp").read_text().splitlines()[1:]]
    (port,) = {
        int(words[1].rpartition(":")[2], 16)
        for words in lines
        if words[9] in inodes and words[1].rpartition(":")[2] != "0000"
    }
    return port


@pytest.mark.parametrize("end", ["the last member dies", "the head is gone"])
def test_ranks_that_have_joined_are_waited_for(reach, end):
    """No rank of the start is left, and the signal to stop takes the way over the head."""
    head = Head(["there", "there"], KEEP_ALIVE)
    run, secret = bytes(16), b"secret"
    server = HeadServer(head, run, secret, "127.0.0.1", print)
    text = Rendezvous(run, secret, server.place, KEEP_ALIVE).text()
    try:
        watcher = reach("sh", "-c", "kill -9 $$", **{LINKS: text})
        until(lambda: head.dead == {0})
        with pytest.raises(subprocess.TimeoutExpired):
            watcher.wait(2 * KEEP_ALIVE)
        assert head.stop is None
        watcher.send_signal(signal.SIGUSR2)
        until(lambda: head.stop == signal.SIGTERM)
        if end == "the head is gone":
            server.close()
        else:
            server.died([1])
        assert watcher.wait(3 * KEEP_ALIVE) == 1
    finally:
        if end != "the head is gone":
            server.close()


def test_an_error_of_the_last_rank_is_no_reason_to_wait(reach):
    server = HeadServer(Head(["there", "there"], 60.0), bytes(16), b"secret", "127.0.0.1", print)
    text = Rendezvous(bytes(16), b"secret", server.place, 60.0).text()
    try:
        assert reach("sh", "-c", "exit 5", **{LINKS: text}).wait(20) == 5
    finally:
        server.close()

"""What `ecrm join` refuses, and the file that it reads."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import time
from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from ecrm.base.errors import UsageError
from ecrm.cli.commands import main
from ecrm.config import load_config
from ecrm.launch import join, rejoin
from ecrm.launch.hosts_file import Host
from ecrm.launch.launcher import check_rejoin
from ecrm.launch.rejoin import (
    FIRST_PAUSE,
    JOIN_SECONDS,
    Rejoin,
    lost_ranks,
    rejoining,
)
from ecrm.run import joining, run_lock
from ecrm.run.gather import decide, gather_results
from ecrm.run.joining import FILE, LIFE, REACHED_BY, JoinFile, why_closed, write_join_file
from ecrm.testing.simulate.oracle import Alone
from ecrm.transport.membership_socket import LINKS, Rendezvous

HOSTS = ["node1", "node2", "node1", "node2"]


@pytest.fixture
def run_dir(tmp_path):
    file = JoinFile("links", HOSTS, "/", ["true"], {}, [])
    (tmp_path / FILE).write_text(json.dumps(asdict(file)))
    live = [{"rank": rank, "live": rank != 1} for rank in range(4)]
    (tmp_path / "ranks.json").write_text(json.dumps({"ranks": live}))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "node9"], "--place node1"),
        (["--host", "node1"], "host node1: its ranks 0, 2 live, and none can be replaced"),
        (["--host", "node9", "--place", "node1"], "host node1: its ranks 0, 2 live"),
    ],
)
def test_a_host_that_cannot_join_is_refused_by_name(run_dir, words, said, capsys):
    assert main(["join", str(run_dir), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_a_run_to_join_is_refused(tmp_path, capsys):
    assert main(["join", str(tmp_path), "--host", "node1"]) == 2
    said = capsys.readouterr().err
    assert "no run over several hosts that ranks can join" in said and "--hosts" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", f"{FILE} cannot be read: type ecrm join as the user of the launch"),
        ('{"links": ""}', f"{FILE} is of another version of ecrm: install the version of the run"),
    ],
)
def test_a_file_that_cannot_be_understood_is_refused(run_dir, content, said, capsys):
    (run_dir / FILE).write_text(content)
    assert main(["join", str(run_dir), "--host", "node2"]) == 2
    assert said in capsys.readouterr().err


def test_only_the_owner_can_read_the_file_and_it_has_what_a_rank_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(joining, "_rendezvous", ["the rendezvous"])
    monkeypatch.setenv("ECRM_HOST", "node1")
    monkeypatch.setenv("ECRM_SPEC_OF_A_TEST", "spec")
    monkeypatch.setenv("PMIX_RANK", "3")
    transport = Alone()
    transport.said_at_start, transport.rounds_at_start = ({0: "said"},), 5
    write_join_file(tmp_path, transport, HOSTS)
    assert JoinFile.read(tmp_path).rounds == 5
    assert stat.S_IMODE(os.stat(tmp_path / FILE).st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    read = JoinFile.read(tmp_path)
    assert read.said == [{"0": "said"}] and read.hosts == HOSTS
    of_rank = read.environment(1, "life", "node2", tmp_path)
    assert of_rank[LINKS] == "the rendezvous" and of_rank["ECRM_SPEC_OF_A_TEST"] == "spec"
    assert of_rank[LIFE] == f"life {tmp_path}" and of_rank["PMIX_RANK"] == "1"
    assert of_rank["ECRM_HOST"] == "node2"


def test_a_run_on_one_host_has_no_such_file(tmp_path, monkeypatch):
    """Nor the file of a run before, by whose word a further launch would name `ecrm join`."""
    monkeypatch.setattr(joining, "_rendezvous", [])
    write_join_file(tmp_path, Alone(), HOSTS)
    (tmp_path / FILE).write_text("{}")
    write_join_file(tmp_path, Alone(), HOSTS)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_told_of(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(joining, "_rendezvous", ["the rendezvous"])
    write_join_file(tmp_path / "gone", Alone(), HOSTS)
    said = capsys.readouterr().err
    assert f"cannot write {tmp_path}/gone/{FILE}: No such file or directory: lost hosts" in said


def test_a_rank_that_joins_gets_the_results_of_the_start():
    first = Alone()
    assert gather_results(first, lambda: "mine") == {0: "mine"}
    assert decide(first, lambda: "decided") == "decided"
    later = Alone()
    later.joined, later.said_at_start = True, first.said_at_start
    later.rounds_at_start = first.rounds_at_start
    assert gather_results(later, lambda: "anew") == {0: "anew"}
    assert decide(later, lambda: pytest.fail("decided long ago")) == "decided"
    assert later.said_at_start == ()
    for value in ("real", "real too"):  # a result of a later call is no result of the start
        assert gather_results(later, lambda value=value: value) == {0: value}
    assert later.said_at_start == ()


class Asked:
    """A join that ends when told."""

    def __init__(self) -> None:
        self.code = None

    def poll(self):
        return self.code


def test_a_lost_host_is_asked_again_with_pauses_that_grow_and_begin_anew():
    now, lost, asked, said = [0.0], {"node1": {0, 2}}, [], []

    def begin(host):
        asked.append((now[0], host.name, Asked()))
        return asked[-1][2]

    hosts = [Host("node1", 1, "node1"), Host("node2", 1, "node2")]
    joins = Rejoin([*hosts, *hosts], lambda: lost, begin, said.append, lambda: now[0])

    def pass_time(seconds):
        for _ in range(int(seconds / 0.5)):
            now[0] += 0.5
            joins.look()

    for pause in (2, 4, 8, 16):
        began, count = now[0], len(asked)
        pass_time(pause + 1)
        assert len(asked) == count + 1 and asked[-1][0] - began == pytest.approx(pause, abs=1.0)
        asked[-1][2].code = 1
        joins.look()
        now[0] = asked[-1][0]  # it has ended at once
        joins._due[hosts[0]] = now[0] + joins._pause[hosts[0]]
    assert {name for _, name, _ in asked} == {"node1"}
    pass_time(40)
    for life, pause in ((310, 64), (650, FIRST_PAUSE), (1, 4), (30, 8)):
        count, back = len(asked), now[0]
        lost.clear()
        pass_time(life)
        assert len(asked) == count, "a host that is back is left alone"
        lost["node1"] = {0, 2}
        pass_time(pause + 1)
        assert len(asked) == count + 1
        assert asked[-1][0] - back - life == pytest.approx(pause, abs=1.5), life
    assert said[:2] == [
        "host node1: asked to join again (cluster.rejoin)",
        "host node1: ecrm join ended with 1, trying again in 4 s",
    ]


def test_a_starter_that_cannot_be_run_is_tried_with_pauses_that_grow():
    now, tried, said = [0.0], [], []

    def begin(host):
        tried.append(now[0])
        subprocess.Popen(["no-such-starter"])

    joins = Rejoin(
        [Host("node1", 1, "node1")], lambda: {"node1": {0}}, begin, said.append, lambda: now[0]
    )
    while now[0] < 100:
        now[0] += 0.5
        joins.look()
    assert [round(after - before) for before, after in zip(tried, tried[1:])] == [4, 8, 16, 32]
    assert said[0] == (
        "host node1: cannot run the starter no-such-starter: No such file or directory, "
        "trying again in 4 s"
    )


class Joins:
    """A Rejoin of node1, of ranks 0 and 2, on a clock of the test."""

    def __init__(self) -> None:
        self.now, self.lost, self.asked, self.said = 0.0, {0, 2}, list[Asked](), list[str]()
        self.joins = Rejoin(
            [Host("node1", 2, "node1")],
            lambda: {"node1": self.lost},
            self._begin,
            self.said.append,
            lambda: self.now,
        )

    def _begin(self, host):
        self.asked.append(Asked())
        return self.asked[-1]

    def look_for(self, seconds):
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            self.joins.look()


def test_a_host_that_is_lost_again_does_not_wait_for_the_end_of_its_starter():
    """A connection of ssh to a host without power may stand for long."""
    node = Joins()
    node.look_for(30)
    assert len(node.asked) == 1, "a join that has not brought its ranks back goes on"
    node.lost = set()
    node.look_for(1)
    node.lost = {0, 2}
    node.look_for(2 * FIRST_PAUSE + 1)
    assert len(node.asked) == 2 and node.joins.processes == node.asked[::-1]
    node.asked[0].code = 255
    node.look_for(1)
    assert node.joins.processes == node.asked[1:] and len(node.asked) == 2


def test_a_rank_lost_while_others_of_its_host_join_is_brought_back_too():
    node = Joins()
    node.lost = {0}
    node.look_for(FIRST_PAUSE + 1)
    node.lost = {0, 2}  # during the join of rank 0
    node.look_for(30)
    assert len(node.asked) == 1
    node.lost = {2}  # rank 0 is back, by a process that goes on
    node.look_for(2 * FIRST_PAUSE + 1)
    assert len(node.asked) == 2 and len(node.joins.processes) == 2
    node.lost = set()
    node.look_for(1000)
    assert len(node.asked) == 2


def test_a_join_that_does_not_bring_all_ranks_back_is_followed_by_another():
    node = Joins()
    node.look_for(FIRST_PAUSE + 1)
    node.lost = {2}  # rank 2 cannot be started; rank 0 goes on
    node.look_for(JOIN_SECONDS - 5)
    assert len(node.asked) == 1
    node.look_for(10 + 2 * FIRST_PAUSE)
    assert len(node.asked) == 2
    assert node.said[1] == "host node1: rank 2 did not join in 600 s, trying again in 4 s"


def test_lost_ranks_are_read_from_the_run(run_dir):
    placed = [Host(name, 2, name) for name in HOSTS]
    assert lost_ranks(run_dir, placed, None) == {"node2": {1}}
    assert lost_ranks(run_dir, placed, "a later launch") is None
    (run_dir / "failure.json").write_text('{"message": "lost"}')
    assert lost_ranks(run_dir, placed, None) == {}, "after the end"
    (run_dir / "failure.json").unlink()
    (run_dir / FILE).unlink()
    assert lost_ranks(run_dir, placed, None) == {}, "before ranks can join"


def test_a_run_that_has_ended_takes_no_rank(run_dir, capsys):
    assert why_closed(run_dir, None) == ""
    (run_dir / "stopped.json").write_text('{"step": 3}')
    assert why_closed(run_dir, None) == "the run has ended"
    assert why_closed(run_dir, "a later launch") == ""
    assert main(["join", str(run_dir), "--host", "node2"]) == 2
    assert "the run has ended" in capsys.readouterr().err


def test_a_second_session_takes_no_rank_and_says_so(run_dir, capsys):
    (run_dir / "session-2").mkdir()
    live = [{"rank": rank, "live": rank != 0} for rank in range(4)]
    (run_dir / "session-2" / "ranks.json").write_text(json.dumps({"ranks": live}))
    assert main(["join", str(run_dir), "--host", "node2"]) == 2
    why = "a second session of the script has begun, and admits no rank"
    assert f"{why}: leave the host out" in capsys.readouterr().err
    placed, said = [Host(name, 2, name) for name in HOSTS], []
    joins = Rejoin(
        placed,
        lambda: lost_ranks(run_dir, placed, None),
        lambda host: pytest.fail("none can join"),
        said.append,
        closed=lambda: why_closed(run_dir, None),
    )
    for _ in range(3):
        joins.look()
    assert said == [f"host node1 stays lost: {why}"], "of the newest session, once"


def test_a_host_without_the_folder_of_the_launch_is_refused(run_dir, capsys):
    file = JoinFile("links", HOSTS, "/nowhere", ["true"], {}, [])
    (run_dir / FILE).write_text(json.dumps(asdict(file)))
    assert main(["join", str(run_dir), "--host", "node2"]) == 2
    assert "/nowhere: No such file or directory" in capsys.readouterr().err


def test_a_run_that_cannot_take_hosts_back_is_refused():
    with pytest.raises(UsageError, match="leave the key out, or type --hosts FILE"):
        check_rejoin(over_hosts=False)
    check_rejoin(over_hosts=True)
    sets = ["data.path=d", "protection.name=checkpoint", "checkpoint.every_steps=5"]
    with pytest.raises(UsageError, match="which admits no rank: set cluster.rejoin=false"):
        load_config("tiny", ["cluster.rejoin=true", *sets])
    assert not load_config("tiny", sets).cluster.rejoin


def reached(run_dir, head, addresses, starter="echo {host}"):
    """The run has this head machine, and hosts at these addresses."""
    links = Rendezvous(bytes(16), b"secret", (head, 9), 1.0).text()
    variables = {REACHED_BY: json.dumps([starter, addresses])}
    file = JoinFile(links, HOSTS, "/", ["true"], variables, [])
    (run_dir / FILE).write_text(json.dumps(asdict(file)))


ELSEWHERE = "192.0.2.1"


def test_typed_on_the_head_machine_the_join_is_started_on_the_host(run_dir, capfd, monkeypatch):
    monkeypatch.chdir("/")
    reached(run_dir, "127.0.0.1", {"node1": "127.0.0.1", "node2": ELSEWHERE})
    assert main(["join", str(run_dir), "--host", "node2"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[0] == "host node2: ecrm join is started there"
    assert said[1].startswith("node2 ") and said[1].endswith(
        f"-m ecrm join {run_dir} --host node2 --here"
    )
    reached(
        run_dir, "127.0.0.1", {"node1": "127.0.0.1", "node2": ELSEWHERE}, "no-such-starter {host}"
    )
    assert main(["join", str(run_dir), "--host", "node2"]) == 2
    assert "cannot run the starter no-such-starter" in capfd.readouterr().err


def test_typed_on_a_host_that_is_another_it_is_refused(run_dir, capsys, monkeypatch):
    monkeypatch.chdir("/")
    reached(run_dir, ELSEWHERE, {"node1": "127.0.0.1", "node2": ELSEWHERE})
    assert main(["join", str(run_dir), "--host", "node2"]) == 2
    said = capsys.readouterr().err
    assert "--host node2: this machine is host node1 of the run: type this on host node2" in said


@pytest.mark.parametrize("host", ["node2", "node9"])
def test_typed_on_a_machine_that_is_no_host_it_is_refused(run_dir, capsys, monkeypatch, host):
    """As on a login node that has the run's folder."""
    monkeypatch.chdir("/")
    reached(run_dir, ELSEWHERE, {"node1": ELSEWHERE, "node2": ELSEWHERE, "node9": ELSEWHERE})
    assert main(["join", str(run_dir), "--host", host, "--place", "node2"]) == 2
    said = capsys.readouterr().err
    assert f"--host {host}: {ELSEWHERE} is no address of this machine: type this on host" in said


def test_a_new_host_is_reached_from_the_head_machine(run_dir, capfd, monkeypatch):
    """Also if the head machine is a host of the run: node9 must not be a second name of it."""
    monkeypatch.chdir("/")
    reached(run_dir, "127.0.0.1", {"node1": "127.0.0.1", "node2": ELSEWHERE})
    assert main(["join", str(run_dir), "--host", "node9.invalid", "--place", "node2"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[0] == "host node9.invalid: ecrm join is started there"
    assert said[1].endswith("--host node9.invalid --place node2 --here")
    assert main(["join", str(run_dir), "--host", "localhost", "--place", "node2"]) == 2
    assert "--host localhost: this machine is host node1" in capfd.readouterr().err


@pytest.mark.parametrize("host", ["node 9", "$(true)", "-x", ""])
def test_a_host_is_named_as_in_a_hosts_file(run_dir, capsys, host):
    assert main(["join", str(run_dir), f"--host={host}", "--place", "node2"]) == 2
    assert f"--host {host!r}: not a host's name" in capsys.readouterr().err


def test_a_file_of_another_user_is_no_missing_run(run_dir, capsys, monkeypatch):
    """Another user cannot even see whether the file is there."""

    def forbidden(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(joining.Path, "read_text", forbidden)
    monkeypatch.setattr(joining.Path, "stat", forbidden)
    assert main(["join", str(run_dir), "--host", "node2"]) == 2
    assert f"{FILE} cannot be read: type ecrm join as the user of the launch" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("head", "addresses", "here"),
    [
        (ELSEWHERE, {"node1": ELSEWHERE, "node2": "127.0.0.1"}, True),
        (ELSEWHERE, {"node1": "no.such.host.invalid", "node2": "no.such.host.invalid"}, True),
        (ELSEWHERE, {}, True),
        ("127.0.0.1", {"node1": ELSEWHERE}, False),
        ("127.0.0.1", {"node1": "127.0.0.1", "node2": "127.0.0.1"}, True),
        ("127.0.0.1", {"node1": ELSEWHERE, "node2": "127.0.0.1"}, True),
        ("127.0.0.1", {"node1": ELSEWHERE, "node2": "no.such.host.invalid"}, False),
    ],
)
def test_a_machine_is_the_host_by_its_address(run_dir, monkeypatch, head, addresses, here):
    """Names of a hosts file may be known to the starter alone."""

    def bind(address):
        if address[0] in ("no.such.host.invalid", "node2"):
            raise socket.gaierror
        if address[0] == ELSEWHERE:
            raise OSError

    monkeypatch.setattr(join.socket, "socket", lambda *_: nullcontext(SimpleNamespace(bind=bind)))
    reached(run_dir, head, addresses)
    assert join._is_here(JoinFile.read(run_dir), "node2") == here


def test_ranks_of_a_host_that_has_taken_a_place_are_found_by_both_names(run_dir, capsys):
    ranks = [{"rank": rank, "live": rank != 1, "host": HOSTS[rank]} for rank in range(4)]
    ranks[1]["host"] = "node9"
    (run_dir / "ranks.json").write_text(json.dumps({"ranks": ranks}))
    file = JoinFile.read(run_dir)
    for host in ("node9", "node2"):
        assert join._lost(run_dir, file, host, host) == [1]
    assert main(["join", str(run_dir), "--host", "node1", "--place", "node2"]) == 2
    assert "--host node1: its ranks 0, 2 live, and the loss" in capsys.readouterr().err


def test_a_launch_into_the_folder_of_a_living_run_names_the_join(run_dir):
    with pytest.raises(UsageError, match=f"for a lost host of the run, type ecrm join {run_dir}"):
        run_lock._refuse(run_dir, 1, 1e9)
    (run_dir / FILE).unlink()
    with pytest.raises(UsageError, match="or name another folder$"):
        run_lock._refuse(run_dir, 1, 1e9)


def test_lines_of_joins_are_shown_by_the_launch(run_dir):
    """Not by the processes themselves, which would write into the screen."""
    came = []
    placed = [Host(name, 2, name) for name in HOSTS]
    words = "sh -c 'echo {host} for {command}'"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejoin, "FIRST_PAUSE", 0.0)
        patch.setattr(rejoin, "LOOK_SECONDS", 0.01)
        with rejoining(run_dir, placed, words, None, lambda lines: came.extend(lines)):
            deadline = time.monotonic() + 10
            while not _by_starter(came) and time.monotonic() < deadline:
                time.sleep(0.01)
    assert "host node2: asked to join again (cluster.rejoin)\n" in came
    assert f"ecrm join {run_dir} --host node2" in _by_starter(came)[0]


def _by_starter(lines):
    """Those of the join, among lines of the launch, which may ask again before."""
    return [line for line in lines if line.startswith("node2 for ")]

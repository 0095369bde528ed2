"""The hosts file, where ranks go, the words that reach a host, and what a wrong --hosts is told."""

from __future__ import annotations

import ipaddress
import shlex
import sys
from pathlib import Path

import pytest

from ecrm.base.errors import UsageError
from ecrm.config import ClusterConfig, Config
from ecrm.launch.hosts_file import Host, place, placement_in_words, read_hosts
from ecrm.launch.network import Network, choose_network, local_networks
from ecrm.launch.remote_host import DEFAULT_STARTER, handed_on, starter_words
from ecrm.launch.remote_run import variables_of
from ecrm.launch.several_hosts import RemoteHosts
from support.commands import assert_one_line, dry_run

HOST = Host("node1", 2, "10.0.0.1")
COMMAND = ["/a b/python", "-I", 'it\'s "$HOME".py']


def written(tmp_path, text: str):
    path = tmp_path / "hosts"
    path.write_text(text)
    return path


def names(hosts) -> str:
    return " ".join(host.name for host in hosts)


def test_a_hosts_file(tmp_path):
    path = written(
        tmp_path,
        "# rack 1\n\nnode1 slots=2\n  node2 address=10.0.0.2 # slow\r\n"
        "node-3.example slots=10 address=n3\n",
    )
    assert read_hosts(path) == [
        Host("node1", 2, "node1"),
        Host("node2", 1, "10.0.0.2"),
        Host("node-3.example", 10, "n3"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "a\nb slots=x\n",
            "hosts:2: slots=x is not a number from 1 to 999999; a line is NAME [slots=N]",
        ),
        ("a slots=0", "hosts:1: slots=0 is not a number"),
        ("a slots=-1", "hosts:1: slots=-1 is not a number"),
        ("a slots=", "hosts:1: slots= is not a number"),
        ("a 2", "hosts:1: cannot read '2'"),
        ("a slot=2", "hosts:1: cannot read 'slot=2'"),
        ("a slots=2 slots=3", "hosts:1: slots= is given twice"),
        ("a address=", "hosts:1: address= is not an address"),
        ("a address=-oProxyCommand=x", "hosts:1: address=-oProxyCommand=x is not an address"),
        ("-x", "hosts:1: '-x' is not a host's name"),
        ("a;reboot", "hosts:1: 'a;reboot' is not a host's name"),
        (
            "# one\na\nb\na slots=2",
            "hosts:4: a is on line 2 already; for more ranks on it type one line, a slots=N",
        ),
        ("", "names no host"),
        ("# none\n\n", "names no host"),
    ],
)
def test_a_wrong_hosts_file_is_told_by_line(tmp_path, text, said):
    with pytest.raises(UsageError) as caught:
        read_hosts(written(tmp_path, text))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_hosts_file_that_is_no_file(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read_hosts(tmp_path / "absent")
    with pytest.raises(UsageError, match="directory"):
        read_hosts(tmp_path)
    (tmp_path / "hosts").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not a text file"):
        read_hosts(tmp_path / "hosts")


def test_ranks_go_round_over_the_hosts_that_have_room(tmp_path):
    hosts = [Host("a", 1, "a"), Host("b", 3, "b"), Host("c", 2, "c")]
    assert names(place(hosts, 6, tmp_path)) == "a b c b c b"
    assert names(place(hosts, 2, tmp_path)) == "a b"
    assert placement_in_words(place(hosts, 6, tmp_path)) == [
        "a: rank 0",
        "b: ranks 1, 3, 5",
        "c: ranks 2, 4",
    ]
    with pytest.raises(
        UsageError, match="room for 6 of the 7 ranks of this run; add hosts, or slots=N"
    ):
        place(hosts, 7, tmp_path)


def test_words_that_reach_a_host():
    assert starter_words("ip netns exec {host}", HOST, COMMAND) == [
        "ip",
        "netns",
        "exec",
        "node1",
        *COMMAND,
    ]
    over_ssh = starter_words(DEFAULT_STARTER, HOST, COMMAND)
    assert over_ssh[0] == "ssh" and over_ssh[-2] == "10.0.0.1"
    assert shlex.split(over_ssh[-1]) == COMMAND  # what the shell at the other end makes of it
    assert starter_words("x '{host} at {address}' {command}", HOST, ["a"]) == [
        "x",
        "node1 at 10.0.0.1",
        "a",
    ]
    for template, said in (
        ("", "empty"),
        ("ssh 'x", "No closing quotation"),
        ("ssh node1", "names neither"),
    ):
        with pytest.raises(UsageError, match=said):
            starter_words(template, HOST, COMMAND)


def test_variables_for_a_rank_elsewhere():
    environ = {
        "OMP_NUM_THREADS": "2",
        "PYTHONHASHSEED": "7",
        "ECRM_A": "a b",
    }
    others = {"SECRET": "s", "PATH": "p", "OMPI_X": "", "PMIX_RANK": "1"}
    assert handed_on({**environ, **others}, HOST) == {**environ, "ECRM_HOST": "node1"}


def network(name: str, address: str, subnet: str) -> Network:
    return Network(name, address, ipaddress.IPv4Network(subnet))


NETWORKS = [network("lo", "127.0.0.1", "127.0.0.0/8"), network("eth0", "10.0.0.9", "10.0.0.0/24")]


def test_the_network_is_the_one_that_the_hosts_are_in():
    near, far = Host("a", 1, "10.0.0.1"), Host("b", 1, "10.0.1.1")
    assert choose_network(None, [near], NETWORKS).interface == "eth0"
    assert choose_network("10.0.0.0/24", [far], NETWORKS).interface == "eth0"
    assert choose_network("eth0", [far], NETWORKS).address == "10.0.0.9"
    with pytest.raises(
        UsageError, match=r"host b \(10.0.1.1\) is not in one subnet .* --interface NAME"
    ):
        choose_network(None, [near, far], NETWORKS)
    with pytest.raises(UsageError, match="--interface eth1: no such .* eth0 10.0.0.0/24"):
        choose_network("eth1", [near], NETWORKS)
    with pytest.raises(
        UsageError, match="host a: no address is known for 'a.invalid'; type address=A.B.C.D"
    ):
        choose_network(None, [Host("a", 1, "a.invalid")], NETWORKS)


def test_a_subnet_of_all_pods_takes_the_address_within():
    pod = network("eth0", "10.244.3.7", "10.244.3.7/32")
    other = Host("b", 1, "10.244.9.1")
    wide = choose_network("10.244.0.0/16", [other], [NETWORKS[0], pod])
    assert wide == network("eth0", "10.244.3.7", "10.244.0.0/16")
    assert choose_network("eth0", [other], [pod]) == pod
    for nothing in ("10.245.0.0/16", "10.244.3.7", "10.244.0.0/99", "a/b"):
        with pytest.raises(UsageError, match=f"--interface {nothing}: no such interface"):
            choose_network(nothing, [other], [NETWORKS[0], pod])
    with pytest.raises(UsageError, match="several .* lo 127.0.0.1, eth0 10.244.3.7: type a sma"):
        choose_network("0.0.0.0/0", [other], [NETWORKS[0], pod])


def test_this_machine_has_a_loopback():
    assert any(
        network.address == "127.0.0.1" and str(network.subnet) == "127.0.0.0/8"
        for network in local_networks()
    )


def test_the_line_of_a_launch_over_hosts(tmp_path):
    config = Config(cluster=ClusterConfig(servers=2, trainers=1, spares=0))
    path = written(tmp_path, "a slots=2 address=127.0.0.1\nb address=127.0.0.2\n")
    plan = RemoteHosts(path, starter="ssh {host} {command}", keep_alive=3).plan(config.world_size)
    assert plan.in_words() == ["a: ranks 0, 2", "b: rank 1"]
    assert shlex.join(plan.command(["ecrm"], Path("/runs/x"))) == (
        f"{sys.executable} -m ecrm.launch.remote_run --hosts {path} --ranks 3 --head 127.0.0.1 "
        "--keep-alive 3 "
        "--starter 'ssh {host} {command}' --begun /runs/x/ranks.json -- ecrm"
    )


def test_ranks_of_other_hosts_get_the_variables_of_mpirun_and_no_mpi(tmp_path):
    placed = place([Host("a", 2, "a"), Host("b", 1, "b")], 3, tmp_path)
    assert variables_of(placed, placed[0], "job") == {
        rank: {
            "PMIX_NAMESPACE": "job",
            "PMIX_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "3",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
            "OMPI_MCA_mpi_ft_enable": "1",
        }
        for local, rank in enumerate((0, 2))
    }


def test_wrong_options_are_one_line_and_exit_code_2(tmp_path, criteo_rows):
    path = written(tmp_path, "a slots=6 address=127.0.0.1\n")
    for words, said in (
        (["--hosts", str(tmp_path / "absent")], "No such file"),
        (["--starter", "ssh {host}"], "--starter goes with --hosts FILE, which is missing"),
        (["--keep-alive", "3"], "--keep-alive goes with --hosts FILE"),
        (
            ["--hosts", str(path), "--keep-alive", "0.1"],
            "--keep-alive 0.1: type seconds from 0.5 to 3600",
        ),
        (["--hosts", str(path), "--keep-alive", "nan"], "--keep-alive nan: type seconds"),
        (
            ["--hosts", str(path), "--mpirun-args=--display-map"],
            "--mpirun-args with --hosts: no mpirun runs; leave --mpirun-args out",
        ),
        (["--hosts", str(path), "--starter", "ssh"], "names neither {host} nor {address}"),
        (["--hosts", str(path), "--set", "cluster.spares=2"], "room for 6 of the 7 ranks"),
    ):
        done = dry_run(criteo_rows, *words)
        assert done.stdout == ""
        assert_one_line(done, said)


def test_a_run_that_no_host_may_leave_is_told_so(tmp_path, criteo_rows):
    path = written(
        tmp_path,
        "a slots=3 address=127.0.0.1\nb slots=3 address=127.0.0.1\n"
        "c slots=3 address=127.0.0.1\nd slots=3 address=127.0.0.1\n",
    )
    for words, told in (([], True), (["--set", "cluster.failure_domain=host"], False)):
        done = dry_run(criteo_rows, "--hosts", str(path), *words)
        assert done.returncode == 0, done.stderr
        assert ("# warning" in done.stdout) == told

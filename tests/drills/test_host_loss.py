"""Whole hosts are lost while a model is trained on them: every process killed, or the link cut.

support/host_loss.py starts such runs. Hosts are network namespaces (support/imitated_hosts.py),
each with a host name, processes and temporary files of its own. They are reached by
support/programs/imitated_ssh.py: what runs there outlives its client.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from support.commands import ecrm
from support.drilling import LONG, RUN_SECONDS, Mpirun, Run, launch, mpirun_line
from support.examples import EXAMPLES, LAYOUT, run_example
from support.host_loss import (
    KEEP_ALIVE,
    ONE_LOST,
    Training,
    check,
    gaps,
    lose,
    survives_the_loss,
    trainings,
)
from support.imitated_hosts import imitated, why_not
from support.paths import PROGRAMS
from support.slurm_cluster import why_no_slurm
from support.ssh_servers import why_no_ssh

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

TWO_LOST = {
    "cluster.failure_domain": "host",
    "cluster.servers": 4,
    "cluster.trainers": 2,
    "cluster.spares": 2,
    "protection.m": 2,
}


SHORT = {"train.steps": 60}


@pytest.fixture(scope="module")
def undisturbed_short(tmp_path_factory, criteo_rows):
    folder = tmp_path_factory.mktemp("undisturbed_short") / "run"
    return launch(folder, criteo_rows, {**LONG, **SHORT}).model


@pytest.fixture
def train(tmp_path, criteo_rows):
    with trainings(tmp_path, criteo_rows) as start:
        yield start


def test_a_host_is_lost_while_a_script_trains(train, tmp_path):
    (tmp_path / "calm").mkdir()
    own = ("--steps", "400")
    calm = run_example("two_tower.py", tmp_path / "calm", (), own)
    assert calm.code == 0, calm.output
    sets = {**ONE_LOST, "protection.k": 2, "protection.verify_parity_at_end": "true"}
    training = train(3, sets, script=(str(EXAMPLES / "two_tower.py"), *own))
    survives_the_loss(training, "h2", [1, 4], calm.model)


@pytest.mark.parametrize("placement", ["rows", "tables"])
def test_a_host_is_lost_whose_servers_sum_bags(train, tmp_path, placement):
    """Both placements have the model of one host by rows, and only whole tables are summed."""
    script = (str(PROGRAMS / "many_ids.py"), "400")
    calm = tmp_path / "calm"
    words = ("launch", script[0], *LAYOUT, "--run-dir", str(calm), "--", script[1])
    done = ecrm(*words, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    sets = {**ONE_LOST, "protection.k": 2, "protection.verify_parity_at_end": "true"}
    training = train(3, {**sets, "cluster.placement": placement}, script=script)
    survives_the_loss(training, "h2", [1, 4], Run(0, "", calm).model)
    of_servers = [
        rank["kernels"]
        for rank in Run(0, "", training.folder).summary["traffic_bytes_per_rank"]
        if rank["rank"] in (0, 2)  # servers without slots
    ]
    assert [("bag_sum" in kernels) for kernels in of_servers] == [placement == "tables"] * 2


@pytest.mark.skipif(why_no_ssh() is not None, reason=str(why_no_ssh()))
def test_a_host_reached_by_ssh_is_lost(train, undisturbed_long):
    """The default starter, real sshd on every host."""
    training = train(3, ONE_LOST, by="ssh")
    survives_the_loss(training, "h2", [1, 4], undisturbed_long)


@pytest.mark.skipif(why_no_ssh() is not None, reason=str(why_no_ssh()))
def test_a_host_reached_by_ssh_that_was_only_cut_off_is_fenced(train, undisturbed_long):
    training = train(3, ONE_LOST, by="ssh")
    training.wait_for_step(30)
    assert ranks_running(training.hosts.pids("h2")) == {1, 4}
    training.hosts.cut("h2")
    alive = last_alive(training, ("h2",), KEEP_ALIVE)
    assert alive < training.wait_for(lambda event: event["event"] == "failure")["time"]
    training.hosts.mend("h2")
    training.wait_for(lambda event: event["event"] == "resumed")
    while training.process.poll() is None:
        assert not ranks_running(training.hosts.pids("h2"))
        time.sleep(0.05)
    check(training.finish(), undisturbed_long, [[1, 4]])


@pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm()))
def test_a_host_reached_by_srun_is_lost(train, undisturbed_long):
    """A real allocation of real Slurm."""
    training = train(3, ONE_LOST, by="slurm")
    survives_the_loss(training, "h2", [1, 4], undisturbed_long)


STANDSTILL = 2 * KEEP_ALIVE + 1
"""Seconds within which a host is certainly given up: 0.75 keep-alive times, on a busy machine."""


def given_up(training: Training, host: str, other: str, when: float) -> str:
    """What the run says of hosts that do not hear each other; the ranks of `host` die in time."""
    training.wait_until_empty(host, STANDSTILL)
    print(f"{host} was empty after {time.time() - when:.2f} s")
    one, two = (training.hosts.namespace(name) for name in sorted((host, other)))
    return (
        f"ecrm: hosts {one} and {two} do not hear each other, though this machine hears both: "
        f"host {training.hosts.namespace(host)} is given up\n"
    )


@pytest.mark.parametrize("ways", ["both", "one", "other"])
def test_of_two_hosts_that_do_not_hear_each_other_one_is_given_up(train, undisturbed_long, ways):
    """The one behind in the hosts file, whichever way nothing comes."""
    training = train(3, ONE_LOST)
    training.wait_for_step(30)
    when = time.time()
    for way, hosts in {"one": ("h1", "h2"), "other": ("h2", "h1")}.items():
        if ways in ("both", way):
            training.hosts.deafen(*hosts)
    said = given_up(training, "h2", "h1", when)
    run = training.finish()
    check(run, undisturbed_long, [[1, 4]])
    assert run.output.count("do not hear each other") == run.output.count(said) == 1, run.output
    finished = sorted(at for event in run.events_of("progress") for _, at in event["finished"])
    gap = max(after - before for before, after in zip(finished, finished[1:]))
    print(f"gap {gap:.2f} s")
    assert KEEP_ALIVE / 2 < gap < KEEP_ALIVE + 2 * usual_step(run)


def test_a_host_that_no_other_hears_is_the_one_given_up(train, undisturbed_long):
    """It is the first of the hosts file, and in more pairs than the others."""
    training = train(3, ONE_LOST)
    training.wait_for_step(30)
    when = time.time()
    training.hosts.part("h1", "h2")
    training.hosts.part("h1", "h3")
    training.wait_until_empty("h1", STANDSTILL)
    print(f"h1 was empty after {time.time() - when:.2f} s")
    run = training.finish()
    check(run, undisturbed_long, [[0, 3]])
    assert (
        run.output.count("do not hear each other")
        == run.output.count(f"host {training.hosts.namespace('h1')} is given up")
        == 1
    )


def test_two_hosts_that_do_not_hear_each_other_end_a_run_that_can_lose_none(train):
    """The twin that must fail, and does within the same time."""
    training = train(2, {"cluster.servers": 4, "cluster.trainers": 2, "cluster.spares": 0}, slots=3)
    training.wait_for_step(30)
    when = time.time()
    training.hosts.part("h1", "h2")
    said = given_up(training, "h2", "h1", when)
    run = training.finish()
    assert time.time() - when < STANDSTILL + 5
    assert (run.code, (run.folder / "summary.json").exists()) == (3, False), run.output
    assert said in run.output and "more was lost than erasure k=2 m=1 can bring back" in run.output


def test_two_hosts_that_do_not_hear_each_other_from_the_start_end_the_run(train):
    training = train(3, ONE_LOST)
    training.hosts.part("h1", "h2")
    when = time.time()
    run = training.finish()
    print(f"ended after {time.time() - when:.2f} s")
    assert run.code != 0 and not (run.folder / "summary.json").exists(), run.output
    assert (
        "do not hear each other, though this machine hears both" in run.output
        and "Traceback" not in run.output
    )


@pytest.mark.parametrize("count", [1, 10, 100])
def test_connections_that_are_reset_between_two_hosts_cost_no_rank(train, undisturbed_long, count):
    """One connection of ranks after the other, at instants that nobody chooses; m = 1."""
    training = train(3, ONE_LOST)
    training.wait_for_step(30)
    done = 0
    while done < count and training.process.poll() is None:
        if not (reset := training.hosts.reset("h1", "h2")):
            pytest.skip("this kernel does not end connections for ss --kill")
        done += reset
        time.sleep(0.03)
    run = training.finish()
    check(run, undisturbed_long, [])
    assert done >= count, "the run was over before"
    print(f"{done} connections reset, longest step {longest_step(run):.3f} s")
    assert longest_step(run) < 0.5 + usual_step(run)


def test_all_connections_of_two_hosts_reset_at_once_cost_no_rank(train, undisturbed_long):
    training = train(3, ONE_LOST)
    training.wait_for_step(30)
    done = training.hosts.reset("h1", "h2", every=True)
    run = training.finish()
    check(run, undisturbed_long, [])
    print(f"{done} connections reset, longest step {longest_step(run):.3f} s")
    assert done >= 4, "two ranks a host, a connection for each pair"
    assert longest_step(run) < 0.5 + usual_step(run)


def test_a_hole_of_a_second_between_two_hosts_costs_no_rank(train, undisturbed_long):
    training = train(3, ONE_LOST)
    training.wait_for_step(30)
    training.hosts.part("h1", "h2")
    time.sleep(1.0)
    training.hosts.join("h1", "h2")
    run = training.finish()
    check(run, undisturbed_long, [])
    print(f"longest step {longest_step(run):.3f} s")
    assert 0.5 < longest_step(run) < KEEP_ALIVE + 1


def test_a_hole_of_ten_seconds_within_the_keep_alive_time_costs_no_rank(train, undisturbed_long):
    training = train(3, ONE_LOST, "--keep-alive", "30")
    training.wait_for_step(30)
    training.hosts.part("h1", "h2")
    time.sleep(10.0)
    training.hosts.join("h1", "h2")
    run = training.finish()
    check(run, undisturbed_long, [])
    print(f"longest step {longest_step(run):.3f} s")
    assert 8 < longest_step(run) < 12


def test_of_two_halves_that_do_not_hear_each_other_one_goes_on(train, undisturbed_long):
    """Never both: the later half in the hosts file is dead before the other goes on."""
    training = train(4, TWO_LOST)
    training.wait_for_step(30)
    for one in ("h1", "h2"):
        for other in ("h3", "h4"):
            training.hosts.part(one, other)
    alive = last_alive(training, ("h3", "h4"), STANDSTILL)
    failure = training.wait_for(lambda event: event["event"] == "failure")
    assert sorted(failure["ranks"]) == [2, 3, 6, 7]
    resumed = training.wait_for(lambda event: event["event"] == "resumed")
    print(f"dead {resumed['time'] - alive:.2f} s before the others went on")
    assert alive < failure["time"]
    check(training.finish(), undisturbed_long, [[2, 3, 6, 7]])


def test_resets_in_recovery_rebuilding_and_checkpoints_cost_no_further_rank(
    train, undisturbed_long
):
    """A rank is killed; all connections of hosts are reset again and again, till long after."""
    sets = {**ONE_LOST, "checkpoint.every_steps": 10, "protection.rebuild_rows_per_step": 64}
    training = train(3, sets, "--kill", "1@40:parity")
    training.wait_for_step(30)
    resets: list[float] = []
    while training.process.poll() is None and len(resets) < 60:
        for pair in (("h1", "h2"), ("h2", "h3"), ("h1", "h3")):
            if training.hosts.reset(*pair, every=True):
                resets.append(time.time())
    run = training.finish()
    check(run, undisturbed_long, [[1]])
    (failure,), (rebuilt,) = run.events_of("failure"), run.events_of("rebuilt")[:1]
    resumed = run.events_of("resumed")[0]
    spans = {
        "recovery": [(resumed["time"] - resumed["stall_seconds"], resumed["time"])],
        "rebuilding": [(failure["time"], rebuilt["time"])],
        "checkpoint": [
            (event["time"] - event["seconds"], event["time"])
            for event in run.events_of("checkpoint")
        ],
    }
    for name, of in spans.items():
        count = sum(first <= at <= last for at in resets for first, last in of)
        print(f"{count} of {len(resets)} resets in {name}")
        assert count, f"no reset in {name}"
    *others, longest = step_seconds(run)
    print(f"longest steps {others[-1]:.3f} s and {longest:.3f} s")
    assert longest < 0.5 + usual_step(run) + resumed["stall_seconds"]
    assert others[-1] < 0.5 + usual_step(run), "apart from the step of the failure"


@pytest.mark.skipif(why_no_ssh() is not None, reason=str(why_no_ssh()))
def test_a_reset_of_the_ssh_connections_costs_no_rank_and_no_line(train, undisturbed_long):
    training = train(3, ONE_LOST, by="ssh")
    training.wait_for_step(30)
    resets = [training.hosts.reset(name, "head", every=True) for name in training.hosts.names]
    if not any(resets):
        pytest.skip("this kernel does not end connections for ss --kill")
    run = training.finish()
    assert all(resets)
    check(run, undisturbed_long, [])
    assert longest_step(run) < 0.5 + usual_step(run)
    assert "model_sha256" in run.output.partition("step")[2], run.output


CABLES = {"lose": (0.05, 0, 0, 0), "delay": (0, 25, 10, 0), "slow": (0, 0, 0, 10)}
"""Of each host, in shares, milliseconds and megabits a second: a hundredth of a gigabit.

Two cables lie between two hosts.
"""


@pytest.mark.parametrize("bad", CABLES.values(), ids=CABLES)
def test_cables_that_lose_and_delay_cost_time_alone(train, undisturbed_short, bad):
    if shutil.which("g++") is None or not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("no g++, or no /dev/net/tun")
    training = train(3, {**ONE_LOST, **SHORT}, bad=bad[:3], rate=bad[3])
    run = training.finish()
    lost, waited = training.hosts.frames()
    check(run, undisturbed_short, [])
    print(f"usual step {usual_step(run):.3f} s, longest {longest_step(run):.3f} s")
    print(f"{lost} frames lost, {waited} waited for the rate")
    assert usual_step(run) > 2 * bad[1] / 1000, "the cable was there"
    assert (lost > 50, waited > 50) == (bad[0] > 0, bad[3] > 0)


def test_strangers_at_the_ports_of_ranks_are_refused_and_told_of(train, undisturbed_long):
    """Garbage, and many connections that say nothing, at every port of a host that asks who."""
    training = train(3, ONE_LOST)
    training.wait_for_step(30)
    hosts, held = training.hosts, []
    ports = {end for end in hosts.ports("h2") if end[0] == hosts.address("h2")}
    assert len(ports) >= 2, "a port for each rank"
    for number in range(1000):
        for end in ports:
            with contextlib.suppress(OSError):  # the run may be over
                stranger = socket.create_connection(end, timeout=1.0)
                held.append(stranger)
                if number % 2:
                    stranger.sendall(b"GET / HTTP/1.1\r\n" * 10)
        while len(held) > 200:
            held.pop(0).close()
    run = training.finish()
    for stranger in held:
        stranger.close()
    check(run, undisturbed_long, [])
    told = [line for line in run.output.splitlines() if "is no member of this run" in line]
    assert 1 <= len(told) <= 2, run.output
    assert f"{hosts.head} is no member of this run: refused (told once)" in told[0]
    quiet = [line for line in run.output.splitlines() if "connections said nothing" in line]
    assert 1 <= len(quiet) <= 2 and f"the last of {hosts.head}: closed" in quiet[0], run.output


def test_the_head_of_the_run_is_killed_and_the_next_launch_goes_on(train, undisturbed_long):
    """Every rank ends, and a shell loop finishes with the same model, as the recipe for Slurm."""
    sets = {**ONE_LOST, "checkpoint.every_steps": 20}
    training = train(3, sets, "--resume", "auto", loop=True)
    for number in (1, 2):

        def trains(event: dict, number: int = number) -> bool:
            starts = [each for each in training.events if each["event"] == "start"]
            return (
                len(starts) == number and event is training.events[-1] and event.get("step", 0) > 60
            )

        training.wait_for(trains)
        before = head_of(training.process.pid)
        assert before is not None
        os.kill(before, signal.SIGKILL)
        deadline = time.monotonic() + RUN_SECONDS
        while head_of(training.process.pid) in (None, before):
            assert time.monotonic() < deadline and training.process.poll() is None
            time.sleep(0.05)
    run = training.finish()
    check(run, undisturbed_long, [])
    assert run.output.count("the head of the run died of signal 9") == 2, run.output
    assert run.output.count("no answer of the head machine in time: rank killed") == 12, "6 each"
    assert "Traceback" not in run.output


def head_of(pid: int) -> int | None:
    """The head of the run among the descendants of a process."""
    with contextlib.suppress(OSError):  # a process that ends meanwhile
        for child in children_of(pid):
            if b"ecrm.launch.run_head" in words_of(child):
                return child
            if (found := head_of(child)) is not None:
                return found
    return None


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def words_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def step_seconds(run: Run) -> list[float]:
    """Seconds from each finished step to the next, the longest last."""
    finished = sorted(at for event in run.events_of("progress") for _, at in event["finished"])
    return sorted(after - before for before, after in zip(finished, finished[1:]))


def longest_step(run: Run) -> float:
    return step_seconds(run)[-1]


def usual_step(run: Run) -> float:
    """The longest of nine steps in ten."""
    seconds = step_seconds(run)
    return seconds[9 * len(seconds) // 10]


def test_a_host_with_more_ranks_than_m_is_lost(train, undisturbed_long):
    """Two servers and one more rank at once with m = 1: no stripe has two units on one host."""
    training = train(3, {**ONE_LOST, "cluster.servers": 6}, slots=3)
    training.wait_for_step(30)
    lost = training.ranks_of("h2")
    assert lost == [1, 4, 7]
    assert (
        sum(
            len(entry["shards"])
            for entry in Run(0, "", training.folder).ranks
            if entry["rank"] in lost
        )
        == 2
    )
    when = lose(training, "h2")
    run = training.finish()
    check(run, undisturbed_long, [lost])
    gaps(run, [when])


def test_two_hosts_are_lost_one_soon_after_the_other(train, undisturbed_long):
    training = train(4, TWO_LOST)
    training.wait_for_step(30)
    losses = [lose(training, "h2")]
    training.wait_for(lambda event: event["event"] == "resumed")
    losses.append(lose(training, "h3"))
    run = training.finish()
    check(run, undisturbed_long, [[1, 5], [2, 6]])
    gaps(run, losses)


def test_the_host_of_rank_0_is_lost(train, undisturbed_long):
    """Rank 0 is the one that writes and prints; another goes on with that."""
    training = train(3, ONE_LOST)
    survives_the_loss(training, "h1", [0, 3], undisturbed_long)


def test_a_host_that_was_only_cut_off_is_fenced_and_stays_out(train, undisturbed_long):
    """The lost host's ranks are dead before the others go on without them.

    Reconnecting the cable brings none of them back.
    """
    training = train(3, ONE_LOST)
    training.wait_for_step(30)
    assert training.hosts.pids("h2")
    training.hosts.cut("h2")
    when = time.time()
    alive = last_alive(training, ("h2",), KEEP_ALIVE)
    failure = training.wait_for(lambda event: event["event"] == "failure")
    assert alive < failure["time"]
    training.wait_until_empty("h2", KEEP_ALIVE)
    training.hosts.mend("h2")
    training.wait_for(lambda event: event["event"] == "resumed")
    while training.process.poll() is None:
        assert not training.hosts.pids("h2")
        time.sleep(0.05)
    run = training.finish()
    print(f"fenced after {alive - when:.2f} s, given up after {failure['time'] - when:.2f} s")
    check(run, undisturbed_long, [[1, 4]])
    assert [entry["rank"] for entry in run.ranks if not entry["live"]] == [1, 4]


def test_a_host_that_the_head_does_not_hear_is_fenced(train, undisturbed_long):
    """Cut in one direction only.

    What the head sends still arrives, and so do messages between ranks of different hosts.
    """
    training = train(3, ONE_LOST)
    training.wait_for_step(30)
    training.hosts.mute("h2")
    alive: dict[int, float] = {}
    looked = time.time()
    deadline = time.monotonic() + KEEP_ALIVE
    while running := ranks_running(training.hosts.pids("h2")):
        assert time.monotonic() < deadline, f"ranks {running} still run"
        alive |= dict.fromkeys(running, looked)
        looked = time.time()
    run = training.finish()
    check(run, undisturbed_long, [[1, 4]])
    assert "the head machine is lost, it has heard nothing for " in run.output
    given_up = {
        rank: failure["time"] for failure in run.events_of("failure") for rank in failure["ranks"]
    }
    assert sorted(alive) == [1, 4] and all(alive[rank] < given_up[rank] for rank in alive)


def ranks_running(pids: set[int]) -> set[int]:
    """Which ranks, or their guards, are among these processes."""
    ranks = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if b"train" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                ranks |= {
                    int(word.partition(b"=")[2]) for word in words if word.startswith(b"PMIX_RANK=")
                }
    return ranks


def last_alive(training: Training, names: tuple[str, ...], seconds: float) -> float:
    """Waits until no rank runs on some hosts; a time not after the last look that saw one."""
    alive = time.time()
    deadline = time.monotonic() + seconds
    while True:
        looked = time.time()
        running = {rank for name in names for rank in ranks_running(training.hosts.pids(name))}
        if not running:
            return alive
        assert time.monotonic() < deadline, f"ranks {running} still run"
        alive = looked
        time.sleep(0.01)


def agent_of(training: Training, name: str) -> int:
    """The process that started the ranks of a host."""
    for pid in training.hosts.pids(name):
        with contextlib.suppress(OSError):
            if b"/remote_agent.py" in words_of(pid) and ranks_running({*children_of(pid)}):
                return pid
    raise AssertionError(f"no agent on {name}")


def watcher_of(training: Training) -> int:
    """The process that watches the hosts."""
    (found,) = [
        pid
        for pid in children_of(training.process.pid)
        if b"ecrm.launch.remote_run" in words_of(pid)
    ]
    return found


def test_the_ranks_of_a_host_whose_agent_is_stopped_are_dead_before_it_is_given_up(
    train, undisturbed_long
):
    training = train(3, ONE_LOST)
    training.wait_for_step(30)
    agent = agent_of(training, "h2")
    os.kill(agent, signal.SIGSTOP)
    when = alive = time.time()
    while ranks_running(training.hosts.pids("h2")):
        alive = time.time()
        assert alive < when + KEEP_ALIVE
        time.sleep(0.01)
    failure = training.wait_for(lambda event: event["event"] == "failure")
    print(f"fenced after {alive - when:.2f} s, given up after {failure['time'] - when:.2f} s")
    assert alive < failure["time"]
    os.kill(agent, signal.SIGCONT)
    check(training.finish(), undisturbed_long, [[1, 4]])


def lost_in_the_end(training: Training) -> None:
    """The run ends by itself, without a result and without a Python traceback.

    The launcher says so, whether or not a rank was able to write the reason.
    """
    run = training.finish()
    assert run.code not in (0, None), run.output
    assert "Traceback" not in run.output, run.output
    assert "the run did not complete" in run.output, run.output
    assert not (run.folder / "summary.json").exists()


def test_a_stopped_watcher_of_the_hosts_loses_the_run(train):
    """The agents kill the ranks, and the run stands still until the process is continued."""
    training = train(3, ONE_LOST)
    training.wait_for_step(30)
    watcher = watcher_of(training)
    os.kill(watcher, signal.SIGSTOP)
    deadline = time.monotonic() + 2 * KEEP_ALIVE
    while any(ranks_running(training.hosts.pids(name)) for name in training.hosts.names):
        assert time.monotonic() < deadline, "ranks still run"
        time.sleep(0.05)
    time.sleep(KEEP_ALIVE)
    assert training.process.poll() is None
    os.kill(watcher, signal.SIGCONT)
    lost_in_the_end(training)


def test_all_processes_stopped_together_for_longer_than_the_keep_alive_lose_the_run(train):
    training = train(3, ONE_LOST)
    training.wait_for_step(30)
    everyone = [
        watcher_of(training),
        *(pid for name in training.hosts.names for pid in training.hosts.pids(name)),
    ]
    for number, seconds in ((signal.SIGSTOP, 2 * KEEP_ALIVE), (signal.SIGCONT, 0)):
        for pid in everyone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(seconds)
    lost_in_the_end(training)


def test_a_host_with_more_than_m_units_of_a_stripe_is_lost_without_the_failure_domain(train):
    sets = {
        "cluster.failure_domain": "rank",
        "cluster.servers": 3,
        "cluster.trainers": 2,
        "cluster.spares": 1,
        "protection.m": 1,
    }
    training = train(2, sets, slots=3)
    training.wait_for_step(30)
    assert training.ranks_of("h1") == [0, 2, 4]
    lose(training, "h1")
    run = training.finish()
    assert (run.code, (run.folder / "summary.json").exists()) == (3, False), run.output
    assert "more was lost than erasure k=2 m=1 can bring back" in run.output


@pytest.mark.parametrize("name", ["h1", "h2"])
def test_a_host_that_hangs_as_a_whole_and_wakes_is_fenced(train, undisturbed_long, name):
    """All processes of one host stand still for longer than the keep-alive time.

    The host is rank 0's, which writes, or another.
    """
    training = train(3, ONE_LOST)
    training.wait_for_step(30)
    ranks = training.ranks_of(name)
    frozen = training.hosts.pids(name)
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    training.wait_for(lambda event: event["event"] == "resumed")
    for pid in frozen:
        with contextlib.suppress(ProcessLookupError):  # one that was killed meanwhile
            os.kill(pid, signal.SIGCONT)
    woken = time.time()
    gone = training.wait_until_empty(name, KEEP_ALIVE)
    print(f"its processes are gone {gone - woken:.3f} s after they woke")
    run = training.finish()
    check(run, undisturbed_long, [ranks])
    assert not (run.folder / "failure.json").exists()


def test_the_loss_of_the_head_machines_cables_ends_every_rank(train):
    """The head is cut off from all hosts.

    Every agent kills its rank and every client gives up. The launcher says that the run is lost.
    """
    training = train(3, ONE_LOST)
    training.wait_for_step(30)
    for name in training.hosts.names:
        training.hosts.mute(name)
    for name in training.hosts.names:
        training.wait_until_empty(name, 2 * KEEP_ALIVE)
    run = training.finish()
    assert run.code != 0 and not (run.folder / "summary.json").exists(), run.output
    assert "Traceback" not in run.output


def test_the_loss_of_a_host_that_mpirun_itself_started_ends_the_run(tmp_path, criteo_rows):
    """`mpirun --hostfile`: Open MPI's daemons do not survive each other's loss.

    Runs that must survive this use --hosts.
    """
    private, file, rsh, folder = (tmp_path / name for name in ("private", "hosts", "rsh", "run"))
    private.mkdir()
    with imitated(2) as hosts:
        file.write_text("".join(f"{hosts.namespace(name)} slots=3\n" for name in hosts.names))
        program = PROGRAMS / "imitated_ssh.py"
        rsh.write_text(
            f'#!/bin/sh\nhost=$1\nshift\nexec {sys.executable} {program} "$host" {private} "$*"\n'
        )
        rsh.chmod(0o755)
        words = (
            f"--hostfile {file} --mca plm_rsh_agent {rsh} "
            f"--prtemca prte_if_include {hosts.subnet} --mca btl_tcp_if_include {hosts.subnet}"
        )
        sets = {**LONG, **ONE_LOST, "cluster.failure_domain": "rank"}
        mpirun = Mpirun(mpirun_line(folder, criteo_rows, sets, more=(f"--mpirun-args={words}",)))
        run, deadline = Run(0, "", folder), time.monotonic() + RUN_SECONDS
        while not (folder / "events.jsonl").exists() or not run.events_of("progress"):
            assert time.monotonic() < deadline and mpirun.process.poll() is None, (
                mpirun.process.stdout.read()
            )
            time.sleep(0.05)
        assert {rank["host"] for rank in run.ranks} == {
            hosts.namespace(name) for name in hosts.names
        }
        hosts.cut("h2")
        hosts.kill("h2")
        code, output = mpirun.end(60)
        deadline = time.monotonic() + 20
        while hosts.pids("h1"):
            assert time.monotonic() < deadline, hosts.pids("h1")
            time.sleep(0.05)
    assert code != 0 and not (folder / "summary.json").exists(), output


@pytest.mark.parametrize("part", [0.125, 0.5])
def test_a_cable_that_is_out_for_a_moment_costs_nothing(train, undisturbed_long, part):
    """The host kills its ranks after 0.7 keep-alive times without a word of the head machine."""
    training = train(3, ONE_LOST)
    training.wait_for_step(30)
    training.hosts.cut("h2")
    time.sleep(part * KEEP_ALIVE)
    training.hosts.mend("h2")
    run = training.finish()
    check(run, undisturbed_long, [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launch_that_is_ended_leaves_nothing_on_the_hosts(train, number):
    training = train(3, ONE_LOST)
    training.wait_for_step(30)
    if number == signal.SIGKILL:
        head = training.process.pid
        # the launch; mpirun, in a session of its own, is told by the kernel
        os.killpg(head, number)
    else:
        training.process.send_signal(number)
    for name in training.hosts.names:
        training.wait_until_empty(name, 15)
    assert training.process.wait(15) == (130 if number == signal.SIGTERM else -number)
    assert number == signal.SIGKILL or (training.folder / "stopped.json").exists()


def test_one_line_over_hosts_goes_on_after_all_is_killed(train, undisturbed_long):
    """`--resume auto`: the launch is killed twice, the hosts' ranks with it, and it goes on."""
    training = train(3, {**ONE_LOST, "checkpoint.every_steps": 20}, "--resume", "auto")
    for step in (60, 200):
        training.wait_for_step(step)
        os.killpg(training.process.pid, signal.SIGKILL)
        for name in training.hosts.names:
            training.wait_until_empty(name, 15)
        training.process.communicate()
        training.type_again()
    run = training.finish()
    check(run, undisturbed_long, [])
    starts = run.events_of("start")
    assert len(starts) == len(run.summary["lives"]) == 3
    training.type_again()
    run = training.finish()
    assert run.code == 0 and len(run.events_of("start")) == 3, run.output


def test_a_starter_that_is_a_command_without_a_shell(train, undisturbed_long):
    """The starter is `ip netns exec`, so the agent is a child of the head's process.

    A rank is killed, too.
    """
    training = train(3, ONE_LOST, "--kill", "1@20:parity", starter="ip netns exec {host}")
    run = training.finish()
    check(run, undisturbed_long, [[1]])


def test_without_protection_the_loss_of_a_host_ends_the_run(train):
    """The twin that must fail: nothing but the parity brings the lost rows back."""
    training = train(
        3, {**ONE_LOST, "protection.name": "none", "protection.verify_parity_at_end": "false"}
    )
    training.wait_for_step(30)
    lose(training, "h2")
    run = training.finish()
    assert run.code == 3, run.output
    assert not (run.folder / "summary.json").exists()


def test_a_host_lost_while_the_run_begins_ends_it(train, tmp_path):
    """Nothing is trained yet, and ranks that wait for one in MPI_Init would wait for ever."""
    starter = (
        f"sh -c 'case $0 in *h2) mkdir {tmp_path}/first 2>/dev/null || exit 1;; esac; "
        "exec ip netns exec $0 {command}' {host}"
    )
    training = train(3, {**ONE_LOST, "cluster.spares": 0, "cluster.trainers": 1}, starter=starter)
    run = training.finish()
    assert (run.code, run.folder.exists()) == (1, False), run.output
    assert "h2: rank 1 is given up: the starter ended with 1: " in run.output
    assert "the run had not begun, and ends" in run.output

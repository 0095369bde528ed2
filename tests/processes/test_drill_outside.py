"""Kills from outside: whom, when, and never one that the run could not survive."""

import itertools
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from ecrm.config.faults import KILLED_FROM_OUTSIDE, Kill
from ecrm.drill.killers import RandomKiller, ScheduledKiller, Survivability, draws, hosts_of
from ecrm.drill.options import HostKill, RandomKills
from ecrm.testing.faults.kill_switch import KillSwitch
from support.telling import noted_in

START = {"time": 0.0, "event": "start", "world_size": 4}
RANKS = [{"rank": rank, "live": True, "pid": 100 + rank} for rank in (2, 0, 3, 1)]


def victims(events, killed=(), ranks=RANKS):
    state = Survivability()
    state.take(events)
    return [entry["rank"] for entry in state.victims(ranks, killed)]


def progress(left: int) -> dict:
    return {"event": "progress", "failures_left": left}


def failure(ranks: list[int], left: int) -> dict:
    return {"event": "failure", "ranks": ranks, "failures_left": left}


def test_nobody_before_the_run_has_said_what_it_survives():
    assert victims([]) == [] and victims([START]) == []
    assert victims([START, progress(1)]) == [0, 1, 2, 3]


def test_nobody_while_none_more_would_be_survived():
    assert victims([START, progress(1), failure([1], 0)], [1]) == []
    assert victims([START, progress(1), failure([1], 0), progress(0)], [1]) == []
    assert victims(
        [START, progress(1), failure([1], 0), {"event": "rebuilt", "failures_left": 1}], [1]
    ) == [0, 2, 3]


def test_a_kill_that_nobody_has_noticed_yet_counts():
    assert victims([START, progress(1)], [1]) == []
    assert victims([START, progress(2)], [1]) == [0, 2, 3]
    assert victims([START, progress(2)], [1, 3]) == []
    assert victims([START, progress(2), failure([1], 1)], [1, 3]) == []
    assert victims([START, progress(2), failure([1], 1)], [1]) == [0, 2, 3]


def test_a_failure_event_that_died_with_its_writer_is_seen_in_the_next_view():
    events = [START, progress(2), failure([3], 1), {"event": "view", "live": [0, 2]}]
    assert victims(events, [1, 3]) == [0, 2]


def test_dead_ranks_are_not_chosen():
    dead = [{**entry, "live": entry["rank"] != 2} for entry in RANKS]
    assert victims([START, progress(1)], ranks=dead) == [0, 1, 3]


@pytest.fixture
def sleeper(tmp_path):
    """A process that names the run folder in its command line, as ranks do."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path)])
    yield process
    process.kill()
    process.wait()


def write_run(folder, pid, left=1):
    lines = [json.dumps({"time": 0.0, **event}) + "\n" for event in (START, progress(left))]
    (folder / "events.jsonl").write_text("".join(lines))
    rank = {"rank": 2, "pid": pid, "host": socket.gethostname(), "live": True}
    (folder / "ranks.json").write_text(json.dumps({"ranks": [rank]}))


def wait_until(true, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def test_a_rank_is_killed_by_pid_and_recorded(tmp_path, sleeper):
    said = []
    killer = RandomKiller(tmp_path, RandomKills(0.001, 1), said.append)
    killer.start()
    write_run(tmp_path, sleeper.pid)
    assert sleeper.wait(20) == -9
    killer.finish()
    (kill,) = killer.done
    assert (kill.rank, kill.pid, kill.scheduled) == (2, sleeper.pid, None) and abs(
        kill.time - time.time()
    ) < 20
    assert said == [f"! drill: SIGKILL to rank 2 (pid {sleeper.pid})"]


@pytest.mark.parametrize("marker", [".epoch-1/1/.summary.json", "summary.json", "failure.json"])
def test_no_kill_once_the_run_is_over(tmp_path, sleeper, marker):
    write_run(tmp_path, sleeper.pid)
    (tmp_path / marker).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / marker).write_text("{}")
    killer = RandomKiller(tmp_path, RandomKills(0.001), print)
    killer.start()
    assert wait_until(lambda: not killer.is_alive())
    killer.finish()
    assert killer.done == [] and sleeper.poll() is None


def test_it_waits_for_as_long_as_a_kill_would_not_be_survived(tmp_path, sleeper):
    write_run(tmp_path, sleeper.pid, left=0)
    killer = RandomKiller(tmp_path, RandomKills(0.001), print)
    killer.start()
    time.sleep(0.3)
    killer.finish()
    assert killer.done == [] and sleeper.poll() is None
    assert killer.held_back_seconds > 0


def test_a_pid_that_is_another_program_by_now_is_let_be(tmp_path):
    write_run(tmp_path, os.getpid())
    killer = RandomKiller(tmp_path, RandomKills(0.001), print)
    killer.start()
    time.sleep(0.3)
    killer.finish()
    assert killer.done == []


def write_host(folder, pids, host):
    """Rank 2 waits to be killed.

    `pids` are those of its host's ranks, beginning with rank 2. Rank 9 is on another host.
    """
    (folder / "events.jsonl").write_text("")
    ranks = [
        {"rank": rank, "pid": pid, "host": host, "live": True, "failure_domain": name}
        for rank, pid, name in (
            *((2 + number, pid, "a") for number, pid in enumerate(pids)),
            (9, os.getpid(), "b"),
        )
    ]
    (folder / "ranks.json").write_text(json.dumps({"ranks": ranks}))


def due(folder, kill):
    event = {"time": 0.0, "event": "kill_due", "rank": kill.rank, "scheduled": str(kill)}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def host_killer(folder, say=print):
    return ScheduledKiller(folder, [Kill(2, 6)], say, {Kill(2, 6): HostKill("0", 6)})


def test_all_ranks_of_a_host_are_killed_when_one_of_them_waits_for_it(tmp_path, sleeper):
    with subprocess.Popen(sleeper.args) as neighbour:
        write_host(tmp_path, [sleeper.pid, neighbour.pid], socket.gethostname())
        said: list[str] = []
        killer = host_killer(tmp_path, said.append)
        killer.start()
        due(tmp_path, Kill(7, 6))
        time.sleep(0.3)
        assert killer.is_alive() and sleeper.poll() is None, "that is another rank's"
        due(tmp_path, Kill(2, 6))
        assert sleeper.wait(20) == neighbour.wait(20) == -9
        assert wait_until(lambda: not killer.is_alive())
        killer.finish()
    assert [(kill.rank, kill.scheduled) for kill in killer.done] == [(2, "0@6"), (3, "0@6")]
    assert said[0] == "! drill: host a is to die after step 6"


def test_a_host_that_is_not_this_machine_is_not_killed(tmp_path, sleeper):
    write_host(tmp_path, [sleeper.pid], "elsewhere")
    killer = host_killer(tmp_path)
    killer.start()
    due(tmp_path, Kill(2, 6))
    time.sleep(0.3)
    killer.finish()
    assert killer.done == [] and sleeper.poll() is None


def test_hosts_are_known_by_their_lowest_ranks(tmp_path):
    write_host(tmp_path, [1, 2], "here")
    assert hosts_of(tmp_path) == {"a": 2, "b": 9}


@pytest.mark.parametrize(
    ("make", "event"),
    [
        (lambda folder: ScheduledKiller(folder, [Kill(2, 5)], print), {"event": "kill_due"}),
        (lambda folder: RandomKiller(folder, RandomKills(0.001), print), {"event": "start"}),
    ],
)
def test_what_goes_wrong_in_the_thread_is_raised_where_the_drill_waits(tmp_path, make, event):
    (tmp_path / "events.jsonl").write_text(json.dumps({"time": 0.0, **event}) + "\n")
    killer = make(tmp_path)
    killer.start()
    assert wait_until(lambda: not killer.is_alive())
    with pytest.raises(KeyError):
        killer.finish()


WAITING = """
import json, os, sys
from ecrm.config.faults import Kill
from ecrm.testing.faults.kill_switch import KillSwitch
def write(event):
    with open(sys.argv[1] + "/events.jsonl", "a") as file:
        file.write(json.dumps({"time": 0.0, **event.to_dict()}) + chr(10))
switch = KillSwitch([Kill(2, 5, "parity")], 2, None, write)
switch(4, "parity")
switch(5, "update")
print("waits", flush=True)
switch(5, "parity")
print("went on", flush=True)
"""


def test_a_rank_waits_in_its_phase_and_is_killed_by_pid(tmp_path):
    environ = {**os.environ, KILLED_FROM_OUTSIDE: "1"}
    rank = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    killer = ScheduledKiller(tmp_path, [Kill(2, 5, "parity"), Kill(1, 9)], print)
    killer.start()
    events = tmp_path / "events.jsonl"
    assert wait_until(lambda: events.exists() and events.read_text().endswith("\n"))
    assert rank.poll() is None, (
        "it kills nothing by itself, and ranks.json does not say yet who it is"
    )
    entry = {"rank": 2, "pid": rank.pid, "host": socket.gethostname(), "live": True}
    (tmp_path / "ranks.json").write_text(json.dumps({"ranks": [entry]}))
    output, _ = rank.communicate(timeout=20)
    killer.finish()
    assert rank.returncode == -9 and output == "waits\n"
    assert [(kill.rank, kill.pid, kill.scheduled) for kill in killer.done] == [
        (2, rank.pid, "2@5:parity")
    ]


def test_a_rank_that_nobody_kills_goes_on():
    waited, written = [], []
    switch = KillSwitch(
        [Kill(2, 5)], 2, None, noted_in(written), {KILLED_FROM_OUTSIDE: "1"}, waited.append
    )
    for step in range(4, 8):
        switch(step, "input")
    assert len(waited) == 1
    assert written == [
        {"event": "kill_due", "rank": 2, "step": 5, "phase": "input", "scheduled": "2@5:input"}
    ]


def test_a_seed_draws_the_same_kills_and_gaps_have_the_mean():
    first, again, other = (
        list(itertools.islice(draws(RandomKills(20.0, seed=seed)), 2000)) for seed in (5, 5, 6)
    )
    assert first == again != other
    assert 18 < sum(gap for gap, _ in first) / len(first) < 22
    assert all(0 <= position < 1 for _, position in first)

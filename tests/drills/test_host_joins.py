"""Lost hosts come back: `ecrm join` on imitated hosts, in a run that goes on."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ecrm.base.errors import STOPPED_EXIT_CODE
from ecrm.base.version_set import PACKAGE
from support.drilling import RUN_SECONDS, Run
from support.host_loss import KEEP_ALIVE, ONE_LOST, STARTER, check, gaps, lose, trainings
from support.imitated_hosts import why_not
from support.paths import PROGRAMS

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SIX = {
    **ONE_LOST,
    "protection.k": 2,
    "protection.verify_parity_at_end": "true",
    "train.log_every_steps": 5,
}
"""Six ranks of paced.py: a run lasts as long as its joins, however busy the machine is."""


@pytest.fixture
def train(tmp_path, criteo_rows):
    with trainings(tmp_path, criteo_rows) as start:
        yield start


def joining(training, tmp_path, name, on_head=False, before=()):
    """Type `ecrm join` on a host, or on the head machine, with words `before` the command."""
    host = training.hosts.namespace(name)
    typed = [*before, sys.executable, "-m", "ecrm", "join", str(training.folder), "--host", host]
    line = STARTER.format(
        host=host, private=tmp_path / "private", command=shlex.quote(shlex.join(typed))
    )
    return subprocess.Popen(
        typed if on_head else shlex.split(line),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def edited(folder):
    """Copy the package to a `folder`, and add a comment; words that have a command use the copy."""
    shutil.copytree(PACKAGE, folder / "ecrm", ignore=shutil.ignore_patterns("__pycache__"))
    with open(folder / "ecrm" / "nn.py", "a") as source:
        source.write("# edited\n")
    return ["env", f"PYTHONPATH={folder}"]


def test_each_host_is_lost_and_back_in_turn(train, tmp_path):
    """In the end no rank of the start is left."""
    hurry = tmp_path / "hurry"
    script = paced(hurry)
    training = train(3, SIX, script=script)
    training.wait_for_step(30)
    joins = []
    try:
        for name in training.hosts.names:
            ranks = training.ranks_of(name)
            lose(training, name)
            training.wait_for(
                lambda event, ranks=ranks: event["event"] == "failure" and event["ranks"] == ranks
            )
            training.hosts.mend(name)
            joins.append(joining(training, tmp_path, name))
            for rank in ranks:  # each comes back at its own pace
                back = training.wait_for(
                    lambda event, rank=rank: event["event"] == "joined" and rank in event["ranks"]
                )
            training.wait_for(
                lambda event, back=back: (
                    event["event"] == "progress"
                    and event["step"] > back["step"]
                    and event["failures_left"] == 1
                )
            )
        hurry.touch()
        run = training.finish()
    finally:
        said = []
        for each in joins:
            with contextlib.suppress(subprocess.TimeoutExpired):
                said.append(each.communicate(timeout=30)[0])
            if each.poll() is None:
                each.send_signal(signal.SIGKILL)
        print("\n".join(said))
    assert run.code == 0, run.output
    assert_saved_as_alone(script)
    assert run.summary["parity"]["mismatches"] == 0
    joined = [rank for event in run.events_of("joined") for rank in event["ranks"]]
    assert len(joined) == 2 * len(joins)


def test_the_launch_brings_a_lost_host_back_twice(train, tmp_path):
    """The second time the ranks that die are ranks that have joined."""
    hurry = tmp_path / "hurry"
    script = paced(hurry)
    training = train(3, {**SIX, "cluster.rejoin": "true"}, script=script)
    training.wait_for_step(30)
    ranks = training.ranks_of("h2")
    for time_of in range(1, 3):
        lose(training, "h2")
        training.wait_for(lambda event: len(ranks_in(training, "failure")) == 2 * time_of)
        training.hosts.mend("h2")
        training.wait_for(lambda event: len(ranks_in(training, "joined")) == 2 * time_of)
        training.wait_for(
            lambda event: event is training.events[-1] and event.get("failures_left") == 1
        )
    hurry.touch()
    run = training.finish()
    assert run.code == 0, run.output
    assert_saved_as_alone(script)
    assert run.summary["parity"]["mismatches"] == 0
    assert "asked to join again (cluster.rejoin)" in run.output
    assert sorted(ranks_in(training, "joined")) == sorted(2 * ranks)


def test_a_host_outside_the_hosts_file_takes_the_place_of_a_lost_one(train, tmp_path):
    """Typed on the head machine, whose starter reaches the new host by its name."""
    hurry = tmp_path / "hurry"
    script = paced(hurry)
    training = train(4, SIX, script=script, listed=3)
    training.wait_for_step(30)
    ranks = training.ranks_of("h2")
    lose(training, "h2")
    training.wait_for(lambda event: len(ranks_in(training, "failure")) == 2)
    lost, new = (training.hosts.namespace(name) for name in ("h2", "h4"))
    words = [sys.executable, "-m", "ecrm", "join", str(training.folder), "--host", new]
    with subprocess.Popen(
        [*words, "--place", lost],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as typed:
        training.wait_for(lambda event: len(ranks_in(training, "joined")) == 2)
        training.wait_for(
            lambda event: event is training.events[-1] and event.get("failures_left") == 1
        )
        there = training.ranks_of("h4"), training.ranks_of("h2")
        hurry.touch()
        run = training.finish()
        said, _ = typed.communicate(timeout=60)
    assert (run.code, typed.returncode) == (0, 0), run.output + said
    assert there == (ranks, [])
    assert f"host {new}: ecrm join is started there" in said
    assert_saved_as_alone(script)
    assert run.summary["parity"]["mismatches"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_that_have_joined_end_with_the_launch(train, tmp_path, number):
    training = train(3, SIX, script=paced(tmp_path / "never"))
    training.wait_for_step(30)
    lose(training, "h2")
    training.wait_for(lambda event: event["event"] == "failure")
    training.hosts.mend("h2")
    if number == signal.SIGKILL:
        typed = joining(training, tmp_path, "h2", before=edited(tmp_path / "edited"))
        said, _ = typed.communicate(timeout=60)
        assert "the sources of ecrm or the versions here are others" in said and typed.returncode
    typed = joining(training, tmp_path, "h2", on_head=number == signal.SIGTERM)
    training.wait_for(lambda event: len(ranks_in(training, "joined")) == 2)
    training.process.send_signal(number)
    if number == signal.SIGTERM:
        assert training.finish().code == STOPPED_EXIT_CODE
    for name in training.hosts.names:
        training.wait_until_empty(name, 3 * KEEP_ALIVE)
    said, _ = typed.communicate(timeout=30)
    assert ("ecrm join is started there" in said) == (number == signal.SIGTERM)
    assert typed.returncode == (0 if number == signal.SIGTERM else 1), said


def test_ranks_that_have_joined_train_a_second_session_which_admits_no_rank(train, tmp_path):
    """The host is lost again in the second session: the run says that the host stays lost."""
    files = [tmp_path / "first", tmp_path / "second"]
    script = paced(*files)
    training = train(3, {**SIX, "cluster.rejoin": "true"}, script=script)
    training.wait_for_step(20)
    ranks = training.ranks_of("h2")
    lose(training, "h2")
    training.hosts.mend("h2")
    training.wait_for(lambda _: len(ranks_in(training, "joined")) == 2)
    files[0].touch()
    second = training.folder / "session-2"
    later = replace(training, folder=second)
    later.wait_for_step(20)
    processes = [(each["rank"], each["pid"], each["host"]) for each in Run(0, "", second).ranks]
    first = Run(0, "", training.folder).ranks  # written by the reporter, from introductions
    assert [(each["rank"], each["pid"], each["host"]) for each in first] == processes
    lose(training, "h2")
    later.wait_for(lambda event: event["event"] == "failure")
    training.hosts.mend("h2")
    said = joining(training, tmp_path, "h2").communicate(timeout=60)[0]
    assert "a second session of the script has begun, and admits no rank" in said
    files[1].touch()
    run = training.finish()
    assert run.code == 0, run.output
    assert "session 2 admits no rank: a host that is lost stays lost" in run.output
    assert f"host {training.hosts.namespace('h2')} stays lost" in run.output
    assert sorted(ranks_in(training, "joined")) == ranks and not ranks_in(later, "joined")
    assert_saved_as_alone(script)


def test_a_joining_host_that_dies_at_each_stage_comes_back(train, tmp_path):
    """In its start, as a spare that waits, and as a member that gets rows."""
    hurry = tmp_path / "hurry"
    script = paced(hurry, steps=1500)
    training = train(4, FOUR, script=script, slots=1)
    training.wait_for_step(20)
    (rank,) = training.ranks_of("h2")
    lose(training, "h2")
    training.wait_for(lambda event: event["event"] == "failure")
    training.hosts.mend("h2")
    hold = hurry.with_suffix(".hold")
    for stage in ("joining", "until the run admits this rank"):
        hold.touch()  # no commit: the rank waits
        typed = joining(training, tmp_path, "h2")
        wait_for_line(typed, stage)
        lose(training, "h2")
        hold.unlink()
        training.hosts.mend("h2")
        typed.communicate(timeout=60)
        assert not ranks_in(training, "joined")
    for times in (1, 2):
        typed = joining(training, tmp_path, "h2")
        training.wait_for(lambda _, times=times: len(ranks_in(training, "joined")) == times)
        if times == 1:
            lose(training, "h2")
            training.wait_for(lambda _: len(ranks_in(training, "failure")) == 2)
            training.hosts.mend("h2")
    training.wait_for(
        lambda event: event is training.events[-1] and event.get("failures_left") == 1
    )
    hurry.touch()
    run = training.finish()
    assert typed.wait(60) == 0, typed.stdout.read()
    assert_saved_as_alone(script)
    check(run, run.model, [[rank], [rank]])
    assert ranks_in(training, "joined") == [rank, rank]


def test_two_hosts_join_at_once_while_links_are_reset(train, tmp_path):
    """With a checkpoint or an evaluation at most steps, and memory handed out in advance."""
    hurry = tmp_path / "hurry"
    script = paced(hurry)
    sets = {**FOUR, "protection.k": 1, "protection.m": 2, "cluster.rejoin": "true"}
    sets |= {"checkpoint.every_steps": 2, "checkpoint.keep": 1, "storage.prefault": "true"}
    training = train(4, sets, script=script, slots=1)
    training.wait_for_step(20)
    for name in ("h1", "h2"):
        lose(training, name)
    training.wait_for(lambda _: sorted(ranks_in(training, "failure")) == [0, 1])
    for name in ("h1", "h2"):
        training.hosts.mend(name)
    resets, deadline = 0, time.monotonic() + RUN_SECONDS
    while sorted(ranks_in(training, "joined")) != [0, 1]:
        assert time.monotonic() < deadline, training.finish().output
        for one, other in (("h3", "h4"), ("h1", "h3"), ("h2", "h4")):
            resets += training.hosts.reset(one, other)
        training.wait_for(lambda _: True)  # takes the events that have come
    hurry.touch()
    run = training.finish()
    assert resets > 20 and run.summary["failures_left"] == 2, run.output
    assert_saved_as_alone(script)
    check(run, run.model, [[0], [1]])


FOUR = {
    "cluster.failure_domain": "host",
    "cluster.servers": 3,
    "cluster.trainers": 1,
    "cluster.spares": 0,
    "protection.k": 2,
    "protection.verify_parity_at_end": "true",
    "train.log_every_steps": 5,
}
ROUNDS = 5


def test_each_of_four_hosts_is_lost_and_back_five_times(train, tmp_path):
    """Twenty losses, one after the other; at the end the run survives one more."""
    hurry = tmp_path / "hurry"
    script = paced(hurry, steps=2200)
    training = train(4, {**FOUR, "cluster.rejoin": "true"}, script=script, slots=1)
    training.wait_for_step(30)
    left = training.wait_for(lambda event: event["event"] == "start")["failures_left"]
    losses, lost = [], []
    for number in range(ROUNDS * len(training.hosts.names)):
        name = training.hosts.names[number % len(training.hosts.names)]
        ranks = training.ranks_of(name)
        losses.append(lose(training, name))
        lost += ranks
        training.wait_for(lambda _: len(ranks_in(training, "failure")) == len(lost))
        training.hosts.mend(name)
        training.wait_for(lambda _: len(ranks_in(training, "joined")) == len(lost))
        back = [event for event in training.events if event["event"] == "joined"][-1]
        training.wait_for(
            lambda event, back=back: (
                event["event"] == "progress"
                and event["step"] > back["step"] + 5
                and event["failures_left"] == left
            )
        )
    assert left == 1 and Counter(lost) == dict.fromkeys(range(4), ROUNDS)
    losses.append(lose(training, "h2"))
    training.wait_for(lambda _: len(ranks_in(training, "failure")) == len(lost) + 1)
    hurry.touch()
    run = training.finish()
    assert_saved_as_alone(script)
    check(run, run.model, [[rank] for rank in (*lost, *training.ranks_of("h2"))])
    gaps(run, losses)
    no_step_is_longer(run, losses)


def paced(*files, steps=1000):
    """The line of paced.py; a step takes 0.25 s until the session's file is there."""
    return (str(PROGRAMS / "paced.py"), str(steps), *map(str, files))


def wait_for_line(process, said):
    """Until a process has said so."""
    came, output, deadline = "", process.stdout.fileno(), time.monotonic() + RUN_SECONDS
    while said not in came:
        assert time.monotonic() < deadline and process.poll() is None, came
        if select.select([output], [], [], 1.0)[0]:
            came += os.read(output, 1 << 16).decode()


def assert_saved_as_alone(script):
    """The models saved by a disturbed run of a script are those of a process that trains alone."""
    files = [Path(word).with_suffix(".safetensors") for word in script[2:]]
    saved = [file.read_bytes() for file in files]
    done = subprocess.run(
        [sys.executable, *script], capture_output=True, text=True, timeout=2 * RUN_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert saved == [file.read_bytes() for file in files]


def no_step_is_longer(run, losses):
    """No step takes more than the keep-alive time and two steps, neither at a join."""
    finished = sorted(at for event in run.events_of("progress") for _, at in event["finished"])
    steps = sorted(after - before for before, after in zip(finished, finished[1:]))
    usual = steps[-3 * len(losses) - 1]
    print(f"longest step {steps[-1]:.2f} s, of the usual steps {usual:.2f} s")
    assert steps[-1] <= KEEP_ALIVE + 2 * usual, run.output


def ranks_in(training, kind):
    """The ranks in all events of a kind."""
    return [rank for event in training.events if event["event"] == kind for rank in event["ranks"]]

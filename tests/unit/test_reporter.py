"""The run folder when a reporter dies: the next reporter writes what is missing, once."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from ecrm.engine import events
from ecrm.engine.step_log import StepLog
from ecrm.run.reporter import KEPT_COMMITS, Reporter
from ecrm.run.run_folder import RunFolder
from ecrm.run.session_progress import SessionProgress
from support.telling import an


def rank(number: int, folder: RunFolder, cluster: SimpleNamespace) -> Reporter:
    reporter = Reporter(folder, {}, events.Terms(protected=1))
    reporter.watch(
        SimpleNamespace(
            rank=number, view=cluster, step=0, committed=0, state=SimpleNamespace(commits=0)
        )
    )
    return reporter


def told(reporter: Reporter, step: int, line: str = "") -> bool:
    reporter._engine.step = max(reporter._engine.step, step)
    return reporter.progress(step, lambda: (an(events.Progress, step=step), line))


def steps(folder: RunFolder) -> list[int]:
    return [event["step"] for event in folder.events() if "step" in event]


def test_the_next_reporter_writes_what_is_missing_once(tmp_path, capsys):
    cluster, folder = SimpleNamespace(reporter=0), RunFolder(tmp_path)
    first, second = rank(0, folder, cluster), rank(1, folder, cluster)
    for step in (1, 2):
        told(first, step, f"line {step}")
        told(second, step, f"line {step}")
    told(second, 3, "line 3")  # the first has died before it came to it
    cluster.reporter = 1
    assert steps(folder) == [1, 2]
    told(second, 4, "line 4")
    assert steps(folder) == [1, 2, 3, 4]
    assert capsys.readouterr().out.split() == ["line", "1", "line", "2", "line", "3", "line", "4"]


def test_times_of_steps_done_again_come_with_the_next_event(tmp_path):
    """Step 4 is written, then undone, and written no second time."""
    cluster, folder = SimpleNamespace(reporter=0), RunFolder(tmp_path)
    reporter = rank(0, folder, cluster)
    engine = reporter._engine
    engine.state = SimpleNamespace(
        log=StepLog(), commits=0, failures_left=1, rebuild_fraction=1.0, dense=None
    )
    progress = SessionProgress(100, 2, reporter.progress)
    for step in (1, 2, 3, 4, 5):
        engine.step = step
        progress.step_finished(engine)
    engine.step = 2
    progress.on_recovery(engine)
    for step in (3, 4, 5, 6):
        engine.step = step
        progress.step_finished(engine)
    times = [[step for step, _ in event["finished"]] for event in folder.events()]
    assert times == [[1, 2], [3, 4], [5, 3, 4, 5, 6]] and steps(folder) == [2, 4, 6]


def test_what_was_written_commits_ago_is_not_kept(tmp_path):
    cluster, folder = SimpleNamespace(reporter=0), RunFolder(tmp_path)
    reporter = rank(1, folder, cluster)
    for step in range(20):
        reporter._engine.state.commits = step
        told(reporter, step)
    cluster.reporter = 1
    told(reporter, 20)
    assert steps(folder) == [*range(19 - KEPT_COMMITS, 20), 20]


def restored(step: int, epoch: int, *shards: int) -> events.Restored:
    numbers = dict.fromkeys(
        (
            "checkpoint_step",
            "lost_steps",
            "steps_away",
            "kept_rows",
            "lost_slot_steps",
            "last_seen_rows",
            "initial_rows",
        ),
        4,
    )
    accounts = [{"shard": shard, "refused": ["bad"], **numbers} for shard in shards]
    return events.Restored(step=step, epoch=epoch, shards=accounts)


def test_of_shards_restored_at_one_step_by_more_than_one_commit_none_is_lost(tmp_path, capsys):
    cluster, folder = SimpleNamespace(reporter=0), RunFolder(tmp_path)
    first, second = rank(0, folder, cluster), rank(1, folder, cluster)
    told = [restored(7, 3, 0, 2), restored(7, 4, 1), restored(7, 6, 1)]
    first.event(told[0])
    for one in told:
        second.event(one)
    cluster.reporter = 1
    second.event(restored(8, 8, 0))
    assert [[account["shard"] for account in event["shards"]] for event in folder.events()] == [
        [0, 2],
        [1],
        [1],
        [0],
    ]
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 10
        and lines[0] == "! bad"
        and lines[1].startswith("! shard 0 restored from step 4: the updates of 4 steps are lost;")
    )


def finding(step: int, space: int, stripe: int) -> events.Corruption:
    return an(events.Corruption, step=step, kind="unknown", space=space, stripe=stripe, rows=[0, 1])


def test_of_two_corruptions_in_one_commit_the_second_is_not_lost(tmp_path):
    """The reporter has died between writing the one and the other."""
    cluster, folder = SimpleNamespace(reporter=0), RunFolder(tmp_path)
    first, second = rank(0, folder, cluster), rank(1, folder, cluster)
    findings = [finding(7, 0, 3), finding(7, 0, 4), finding(7, 1, 4)]
    first.event(findings[0])
    for one in findings:
        second.event(one)
    cluster.reporter = 1
    told(second, 8)
    written = [
        (event["space"], event["stripe"])
        for event in folder.events()
        if event["event"] == "corruption"
    ]
    assert written == [(0, 3), (0, 4), (1, 4)]


def test_what_is_done_again_after_a_rollback_is_written_again(tmp_path):
    cluster, folder = SimpleNamespace(reporter=0), RunFolder(tmp_path)
    first, second = rank(0, folder, cluster), rank(1, folder, cluster)
    checkpoint = an(events.Checkpoint, step=1, kind="full")
    rolled_back = an(events.RolledBack, epoch=1, from_step=2)
    for reporter in (first, second):
        told(reporter, 1)
        reporter.event(checkpoint)
        reporter.event(rolled_back)
    told(second, 1)  # the first has died before it came to it
    second.event(checkpoint)
    cluster.reporter = 1
    told(second, 2)
    assert [event["event"] for event in folder.events()] == [
        "progress",
        "checkpoint",
        "rolled_back",
        "progress",
        "checkpoint",
        "progress",
    ]


def test_progress_of_a_step_that_is_undone_and_done_again_is_written_once(tmp_path, capsys):
    """Commit interval above 1: the first reporter has written step 2 but not step 3.

    Nobody has committed either step.
    """
    cluster, folder = SimpleNamespace(reporter=0), RunFolder(tmp_path)
    first, second = rank(0, folder, cluster), rank(1, folder, cluster)
    for step in (1, 2, 3):
        if step < 3:
            told(first, step, f"line {step}")
        told(second, step, f"of undone steps {step}")
    cluster.reporter, second._engine.step = 1, 1
    second.event(events.Resumed(ranks=[0], stall_seconds=0.0))
    assert steps(folder)[:2] == [1, 2] and len(folder.events()) == 3
    told(second, 2, "line 2 again")
    told(second, 3, "line 3")
    assert [event["step"] for event in folder.events() if event["event"] == "progress"] == [1, 2, 3]
    assert capsys.readouterr().out.splitlines() == [
        "line 1",
        "line 2",
        "! training goes on, 0 ms between the steps before and after",
        "line 3",
    ]


def test_a_line_that_does_not_fit_is_not_left_half_written(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.event(an(events.Start))
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    folder.event(an(events.Progress))
    assert folder.trouble == f"cannot write {tmp_path}/events.jsonl: No space left on device"
    assert (tmp_path / "events.jsonl").read_text().count("\n") == 1 and len(folder.events()) == 1
    monkeypatch.undo()
    folder.event(an(events.Progress))
    assert len(folder.events()) == 1  # in trouble once, it writes no more


def evaluation(step: int, **values: float) -> events.Evaluation:
    return events.Evaluation(step=step, values=values or {"auc": 0.5}, shards_away=[])


def not_finite(step: int) -> events.NotFinite:
    return an(events.NotFinite, step=step, found_in="step", why=f"the loss of step {step}")


def ended_early(step: int) -> events.EndedEarly:
    return an(events.EndedEarly, step=step, steps_wanted=99)


ONCE = [evaluation, not_finite, ended_early]


@pytest.mark.parametrize("event", ONCE)
@pytest.mark.parametrize("interval", [1, 9])
@pytest.mark.parametrize("dies", ["the reporter", "the reporter before it writes", "another"])
def test_what_a_step_has_to_tell_is_told_once_whoever_dies(tmp_path, capsys, event, interval, dies):
    """Step 4 is done, its event told, and both happen again after a recovery."""
    cluster, folder = SimpleNamespace(reporter=0), RunFolder(tmp_path)
    ranks = [rank(number, folder, cluster) for number in (0, 1)]
    for number, one in enumerate(ranks):
        one._engine.step, one._engine.committed = 4, 4 if interval == 1 else 0
        if number or dies != "the reporter before it writes":
            one.event(event(4))
    if dies != "another":
        del ranks[0]
        cluster.reporter = 1
    for one in ranks:
        one._engine.step = one._engine.committed
        one.event(events.Resumed(ranks=[7], stall_seconds=0.0))
        one._engine.step = 4
        one.event(event(4))
        one._engine.step = one._engine.committed = 5
        one.event(event(5))
    kind = event(4).name
    assert [told["step"] for told in folder.events() if told["event"] == kind] == [4, 5]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_two_functions_that_report_in_a_step_are_told_once_each(tmp_path):
    folder = RunFolder(tmp_path)
    reporter = rank(0, folder, SimpleNamespace(reporter=0))
    for event in (evaluation(4, auc=0.5), evaluation(4, recall=0.1), evaluation(4, auc=0.5)):
        reporter.event(event)
    assert [event["values"] for event in folder.events()] == [{"auc": 0.5}, {"recall": 0.1}]


def test_what_is_not_told_once_a_step_is_told_each_time(tmp_path):
    folder = RunFolder(tmp_path)
    reporter = rank(0, folder, SimpleNamespace(reporter=0))
    for why in ("the disk is full", "no link can be made"):
        reporter.event(events.CheckpointFailed(step=4, why=why))
    assert [event["why"] for event in folder.events()] == [
        "the disk is full",
        "no link can be made",
    ]


def test_ranks_that_have_rolled_back_a_different_number_of_times_know_the_same_events(tmp_path):
    """The second rank has not heard of a rollback that another death broke off."""
    cluster, folder = SimpleNamespace(reporter=0), RunFolder(tmp_path)
    first, second = rank(0, folder, cluster), rank(1, folder, cluster)
    first.event(an(events.RolledBack, epoch=1, from_step=2))
    for one in (first, second):
        one.event(an(events.RolledBack, epoch=2, from_step=2))
        told(one, 1)
        one.event(evaluation(1))
    cluster.reporter = 1
    second.event(evaluation(1))
    told(second, 2)
    assert [event["event"] for event in folder.events()] == [
        "rolled_back",
        "rolled_back",
        "progress",
        "evaluation",
        "progress",
    ]


def test_names_of_steps_that_cannot_come_again_are_forgotten(tmp_path):
    reporter = rank(0, RunFolder(tmp_path), SimpleNamespace(reporter=0))
    for step in range(50):
        reporter._engine.committed = step
        told(reporter, step)
    assert len(reporter._told) < 3


def test_a_rank_that_has_joined_and_dies_again_is_told_of_again(tmp_path):
    """Also by a reporter that reads the file, and each death only once."""
    cluster, folder = SimpleNamespace(reporter=0), RunFolder(tmp_path)
    first, second = rank(0, folder, cluster), rank(1, folder, cluster)
    for reporter in (first, second):
        reporter.event(an(events.Failure, ranks=(2,), step=5))
        reporter.event(an(events.Joined, ranks=(2,), epoch=3))
    cluster.reporter = 1
    second.event(an(events.Failure, ranks=(2,), step=9))
    assert [(each["event"], each["step"]) for each in folder.events()] == [
        ("failure", 5),
        ("joined", 0),
        ("failure", 9),
    ]

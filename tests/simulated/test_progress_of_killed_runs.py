"""Progress depends on the finished steps only: runs with and without deaths log the same events."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ecrm.data.generate import generate_criteo
from ecrm.data.prepare import prepare
from ecrm.engine.step_log import StepLog
from ecrm.testing.simulated_transport import PhaseFault, RandomFaults
from support.simulating import dies_once
from support.training import Telling, Trained, train

# of the tiny config; trainer 3 reports until it dies
SERVER, TRAINER, OTHER_TRAINER, SPARE = 1, 3, 4, 5


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate_criteo(2400, 3, str(folder / "rows.txt"))
    prepare([str(folder / "rows.txt")], str(folder / "ready"), 1000)
    return folder / "ready"


@pytest.fixture(scope="module")
def calm(data, tmp_path_factory) -> Trained:
    return train(tmp_path_factory.mktemp("calm") / "run", data)


def said(run: Trained, again: bool = False) -> dict[int, tuple]:
    """Returns what was logged of each progress step, once.

    With `again` a step may be logged several times, always with the same values.
    """
    told: dict[int, tuple] = {}
    for event in run.of("progress"):
        mine = (event["samples"], event["logged"].get("loss"), event["window"])
        assert (
            told.setdefault(event["step"], mine) == mine if again else event["step"] not in told
        ), event["step"]
        told[event["step"]] = mine
    return told


def test_the_undisturbed_run(calm):
    told = said(calm)
    assert list(told) == [5, 10, 15, 20] and [
        event["samples"] for event in calm.of("progress")
    ] == [320, 640, 960, 1280]
    assert all(0 < loss < 1 and window == 5 for _, loss, window in told.values())


@pytest.mark.parametrize(
    "sets, killed",
    [
        (("cluster.spares=0",), (TRAINER,)),
        ((), (TRAINER,)),
        ((), (SERVER,)),
        (("protection.m=2", "protection.k=1", "cluster.spares=0"), (SERVER, TRAINER)),
        (("protection.commit_interval=4",), (TRAINER,)),
        (("protection.commit_interval=7", "cluster.spares=0"), (OTHER_TRAINER,)),
        (("protection.name=chain",), (TRAINER,)),
        (("protection.name=replicate",), (SERVER,)),
        (("protection.name=mapped", "protection.commit_interval=3"), (TRAINER,)),
        (("cluster.layout=colocated",), (0,)),
        (("cluster.trainers=1",), (3,)),
    ],
)
@pytest.mark.parametrize("phase", ["update", pytest.param("commit", marks=pytest.mark.drill)])
def test_whatever_dies(sets, killed, phase, data, calm, tmp_path):
    run = train(
        tmp_path / "run", data, *sets, faults=[PhaseFault(rank, 8, phase) for rank in killed]
    )
    # not every step commits
    if phase == "update" or not any("commit_interval" in word for word in sets):
        assert sorted(run.killed) == sorted(killed)
        assert any(
            event["ranks"]
            for event in run.of("failure") + run.of("rolled_back")
            if "ranks" in event
        )
    assert said(run, again="protection.name=mapped" in sets) == said(calm)
    assert run.summary["model_sha256"] == calm.summary["model_sha256"]


@pytest.mark.parametrize("has_written", [False, True])
@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("trainers", [1, 2])
def test_the_reporter_dies_as_it_reports(has_written, interval, trainers, data, calm, tmp_path):
    """With one trainer, the reporter may be a rank that never held the dense replica."""
    telling = [Telling(3 if trainers == 2 else 0, 10, has_written)]
    run = train(
        tmp_path / "run",
        data,
        f"protection.commit_interval={interval}",
        f"cluster.trainers={trainers}",
        "cluster.spares=0",
        telling=telling,
    )
    assert run.killed == [telling[0].rank]
    assert said(run) == said(calm)


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("killed", [SERVER, TRAINER])
def test_an_evaluation_that_a_death_has_done_again_is_told_once(killed, interval, data, tmp_path):
    sets = ("train.eval_every_steps=5", f"protection.commit_interval={interval}")
    faults = [PhaseFault(killed, 10, "update")]
    runs = [
        train(tmp_path / name, data, *sets, faults=those)
        for name, those in (("calm", ()), ("killed", faults))
    ]
    told = [[(event["step"], event["values"]) for event in run.of("evaluation")] for run in runs]
    assert [step for step, *_ in told[0]] == [5, 10, 15, 20]
    assert runs[1].killed == [killed] and told[1] == told[0]


def test_random_deaths_and_commit_intervals(data, calm, tmp_path):
    deaths = 0
    for seed in range(6):
        draw = random.Random(seed)
        faults = RandomFaults(2, 0.004, 0.05, may_kill=dies_once(set(), lambda rank: True))
        sets = (
            "protection.m=2",
            "protection.k=1",
            f"protection.commit_interval={draw.choice((1, 1, 3, 8))}",
        )
        run = train(tmp_path / str(seed), data, *sets, faults=faults, seed=seed)
        deaths += len(run.killed)
        assert said(run) == said(calm), seed
    assert deaths > 5


@pytest.mark.parametrize("kind", ["full", "incremental"])
def test_a_rollback_to_the_middle_of_a_window(kind, data, calm, tmp_path):
    sets = ("checkpoint.every_steps=3", f"checkpoint.kind={kind}")
    run = train(
        tmp_path / "run",
        data,
        *sets,
        faults=[PhaseFault(rank, 11, "parity") for rank in (SERVER, 2)],
    )
    assert [event["step"] for event in run.of("rolled_back")] == [9]
    assert said(run, again=True) == said(calm)
    assert run.summary["model_sha256"] == calm.summary["model_sha256"]


def test_a_resumed_run_goes_on_in_the_middle_of_a_window(data, calm, tmp_path):
    train(tmp_path / "first", data, "checkpoint.every_steps=4", "train.steps=12")
    run = train(tmp_path / "second", data, "cluster.servers=4", resume=tmp_path / "first")
    assert said(run) == {step: told for step, told in said(calm).items() if step >= 15}


def test_a_checkpoint_of_earlier_versions_has_no_notes_and_the_line_says_what_it_covers(
    data, calm, tmp_path, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        patch.setattr(StepLog, "export", lambda self, before: [])
        train(tmp_path / "first", data, "checkpoint.every_steps=4", "train.steps=12")
    capsys.readouterr()
    run = train(tmp_path / "second", data, resume=tmp_path / "first")
    told = said(run)
    assert [window for *_, window in told.values()] == [3, 5] and told[20] == said(calm)[20]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert "(of 3 of 5 steps)" in lines[0] and " of 5 steps" not in lines[1]


@pytest.mark.parametrize("protection", ["erasure", "stateless"])
def test_all_slots_count_where_a_server_reports(protection, data, tmp_path):
    sets = ("cluster.trainers=1", "train.slots=2", f"protection.name={protection}")
    sets += ("checkpoint.every_steps=6",) if protection == "stateless" else ()
    run = train(tmp_path / "run", data, *sets, faults=[PhaseFault(SERVER, 8, "update")])
    assert run.killed == [SERVER]
    assert all(
        event["logged"].keys() == {"loss"} and event["window"] == 5 for event in run.of("progress")
    )


def test_a_run_that_went_back_to_its_mapped_files_says_where_its_rows_are(data, calm, tmp_path):
    run = train(
        tmp_path / "run", data, "protection.name=mapped", faults=[PhaseFault(SERVER, 8, "update")]
    )
    assert [event["why"] for event in run.of("rolled_back")] == [
        "rank 1 died: all rows are in the mapped files, as of the last commit"
    ]

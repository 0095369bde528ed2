"""A loss that is not finite: how all ranks learn of it, which checkpoints stay."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ecrm.base.errors import NotFinite
from ecrm.checkpoint.folder import CheckpointFolder, find
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.engine.computed import Computed
from ecrm.engine.hooks import Hooks, StepAborted
from ecrm.run.finite import NO_SCALE, FiniteWatch
from ecrm.testing.simulate.workload import Workload, make_engine, run_workload, train_step
from ecrm.testing.simulated_transport import RandomFaults, SimulatedCluster
from support.telling import noted_in


def ends(
    seed: int, interval: int, deaths: int, protection: str
) -> tuple[set[str], int, int, list[int]]:
    """Returns ({rank: error raised}, step, deaths, commits).

    `step` is the one in which slot 1 reports a loss that is not finite. The errors are those of
    surviving ranks.
    """
    draw = random.Random(seed)
    shape = {"k": 2, "m": 2} if protection == "erasure" else {}
    workload = Workload(
        seed=seed,
        steps=30,
        commit_interval=interval,
        servers=4,
        spares=2,
        protection=protection,
        **shape,
    )
    at = draw.randrange(workload.steps)
    faults = RandomFaults(most=deaths, per_call=0.02, per_recovery_call=0.05) if deaths else ()
    cluster = SimulatedCluster(workload.world_size, seed, faults)

    def program(transport):
        watch = FiniteWatch(stop=True, window=1, tell=lambda fields: None)
        engine, computed = (
            make_engine(workload, transport, Hooks(troubled=watch.losses), lambda: 0.0),
            Computed(),
        )
        apply = engine.apply

        def apply_and_say(given):
            says = engine.step == at and 1 in engine.slots
            apply(replace(given, troubles={1: "in row 7"} if says else {}))

        engine.apply = apply_and_say
        while engine.step < workload.steps:
            try:
                train_step(workload, engine, computed)
            except StepAborted:
                continue
            except NotFinite as error:
                return str(error), engine.step, engine.committed
        return None

    outcome = cluster.run(program)
    assert all(outcome.results.values()), seed
    ended = list(outcome.results.values())
    assert {step for _, step, _ in ended} == {at}, "nothing of the step is kept"
    return (
        {said for said, _, _ in ended},
        at,
        len(outcome.killed),
        [committed for *_, committed in ended],
    )


@pytest.mark.parametrize("interval", [1, 8])
@pytest.mark.parametrize(("deaths", "protection"), [(0, "erasure"), (2, "erasure"), (0, "none")])
def test_all_ranks_hear_it_in_the_step_whoever_dies(interval, deaths, protection):
    died = 0
    for seed in range(8):
        said, at, killed, committed = ends(seed, interval, deaths, protection)
        died += killed
        assert (
            len(said) == 1
            and f"the loss of step {at} is not finite: in slot 1 it began in row 7" in said.pop()
        ), seed
        assert len(set(committed)) == 1
    assert (died > 0) == (deaths > 0)


def test_a_warning_comes_once_in_a_window_and_the_run_goes_on():
    told = []
    watch = FiniteWatch(stop=False, window=10, tell=noted_in(told))
    for step in range(17, 45):
        if troubles := watch.troubles_to_report(step, {1: "in b", 0: "in a"}):
            watch.losses(step, troubles)
    assert [(event["step"], event["slot"], event["where"]) for event in told] == [
        (s, 0, "in a") for s in (17, 20, 30, 40)
    ]


@pytest.mark.parametrize("stop", [True, False])
def test_steps_that_are_skipped_are_counted_once_and_so_many_in_a_row_are_told(stop):
    told: list[dict] = []
    watch, trouble = FiniteWatch(stop, 10, noted_in(told)), {1: "in the gradient of top"}
    steps = [0, 1, *range(20, 51), 1, *range(20, 51), *range(30, 51)]  # gone back twice
    for step in steps:
        watch.skipped(step, trouble)
    assert not told and watch.skipped_before(51) == 33 and watch.skipped_before(50) == 32
    for step in range(100, 149):
        watch.skipped(step, trouble)
    watch.skipped(148, trouble)  # done again
    assert not told
    if stop:
        with pytest.raises(NotFinite, match="50 steps in a row were skipped, up to step 149, .*to"):
            watch.skipped(149, trouble)
        return
    for step in range(149, 165):
        watch.skipped(step, {0: f"{NO_SCALE} 0.0"} if step > 155 else trouble)
    assert [(event["step"], event["slot"]) for event in told] == [(149, 1), (150, 1), (160, 0)]


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.drill)])
@pytest.mark.parametrize("kind", ["full", "incremental"])
@pytest.mark.parametrize("wrong", ["a row", "its state", "the dense state"])
def test_no_checkpoint_is_written_of_what_is_not_finite(tmp_path, stop, mode, kind, wrong):
    """After step 7 a value is infinite.

    The checkpoints of steps 4 and 6 stay, however often others are due.
    """
    workload = Workload(steps=12)
    policy = CheckpointPolicy(steps=12, every_steps=2, mode=mode, kind=kind, keep=2)
    events: list[dict] = []

    def spoil(engine):
        if engine.step < 7:
            return
        if wrong == "the dense state":
            if engine.state.dense is not None:
                engine.state.dense._saved[1] = float("inf")
            return
        for hosted in engine.state.hosted.values():
            row = int(hosted.store._touched.nonzero()[0]) if hosted.store._touched.any() else None
            if row is not None:
                (hosted.store.weights if wrong == "a row" else hosted.store.state[0])[row] = float(
                    "inf"
                )
                if hosted.touched is not None:
                    hosted.touched[row] = True

    def program(transport):
        watch = FiniteWatch(stop, 1, noted_in(events))

        def make(engine):
            return Checkpoints(
                engine,
                CheckpointFolder(tmp_path),
                {},
                policy,
                noted_in(events),
                background=lambda work: work(),
                not_finite=watch.checkpoint,
            )

        try:
            run_workload(workload, transport, after_step=spoil, make_checkpoints=make)
        except NotFinite as error:
            return str(error)
        return None

    said = set(SimulatedCluster(workload.world_size, 1).run(program).results.values())
    assert {checkpoint.step for checkpoint in find(tmp_path)[0]} >= {4, 6}
    assert max(checkpoint.step for checkpoint in find(tmp_path)[0]) == 6
    hidden = [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    # the folder of the epoch may stay after an error, without a draft
    assert all(path.name == ".epoch-0" for path in hidden)
    assert list(tmp_path.glob(".epoch-0/*/*")) == []
    failed = {
        event["step"]: event["why"] for event in events if event["event"] == "checkpoint_failed"
    }
    assert all("not finite" in why for why in failed.values())
    assert sorted(failed) == ([8] if stop else [8, 10, 12])
    (text,) = said
    assert (text is not None) == stop
    if stop:
        assert text.startswith("no checkpoint of step 8: what is not finite is in ")
        assert ("dense" if wrong == "the dense state" else "of table ") in text

"""The best evaluation and its checkpoint, also of a run that goes on."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace

import pytest

from ecrm.checkpoint.folder import Checkpoint, CheckpointFolder, find, locate, name_of
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.checkpoint.restore import Restorer
from ecrm.run.gather import decide
from ecrm.testing.simulate.workload import Workload, run_workload
from ecrm.testing.simulated_transport import RandomFaults, RankKilled, SimulatedCluster
from support.simulating import dies_once


def value(seed: int, step: int) -> float:
    return random.Random(f"{seed} {step}").random()


def run(
    folder, workload: Workload, policy: CheckpointPolicy, seed: int, faults=(), resume=None, most=99
) -> tuple[int, bool]:
    """A simulated run with a made-up evaluation every second step.

    Returns (how many ranks died, whether the run came to its end).
    """
    cluster = SimulatedCluster(workload.world_size, seed, faults, most_calls=300_000)
    finished = []

    def program(transport):
        durable = Restorer(CheckpointFolder(folder), find(resume)[0] if resume is not None else [])
        held: dict[str, object] = {}

        def make(engine):
            loaded = durable.loaded
            own = CheckpointFolder(folder)
            if loaded is not None and engine.rank == engine.view.reporter:
                own.inherit_best(loaded)
            held["checkpoints"] = Checkpoints(
                engine,
                own,
                {"seed": seed},
                policy,
                clock=lambda: 0.0,
                background=lambda work: work(),
                began_from=None if loaded is None else loaded.path,
            )
            return held["checkpoints"]

        def evaluate(engine):
            if engine.step and engine.step % 2 == 0:
                steps = range(2, engine.step + 1, 2)
                if max(steps, key=lambda step: value(seed, step)) == engine.step:
                    held["checkpoints"].keep_best()

        run_workload(
            workload,
            transport,
            after_step=evaluate,
            durable=durable,
            make_checkpoints=make,
            resume=resume is not None,
            report=lambda tables: finished.append(tables),
        )

    outcome = cluster.run(program)
    return len(outcome.killed), bool(finished)


@pytest.mark.parametrize(
    ("kind", "mode", "deaths"),
    [
        ("full", "sync", 0),
        ("incremental", "sync", 2),
        *(
            pytest.param(*others, marks=pytest.mark.drill)
            for others in (
                ("full", "async", 2),
                ("full", "async", 0),
                ("full", "sync", 2),
                ("incremental", "async", 0),
                ("incremental", "sync", 0),
                ("incremental", "async", 2),
            )
        ),
    ],
)
def test_the_best_is_kept_whoever_dies_and_where_another_run_goes_on(tmp_path, kind, mode, deaths):
    died = old = 0
    for seed in range(3):
        workload = Workload(seed=seed, steps=13, k=2, m=2, servers=4, spares=2)
        policy = CheckpointPolicy(
            steps=13, every_steps=3, mode=mode, kind=kind, full_every=3, keep=1, keep_best="auc"
        )
        doomed: set[int] = set()
        faults = RandomFaults(
            most=deaths,
            per_call=0.01,
            per_recovery_call=0.05,
            may_kill=dies_once(doomed, lambda rank: len(doomed) < 2),
        )
        folder, half = tmp_path / f"{seed}", tmp_path / f"{seed}-half"
        killed, _ = run(folder, workload, policy, seed, faults if deaths else ())
        died += killed
        steps = list(range(2, 14, 2))
        expected = max(steps, key=lambda step: value(seed, step))
        assert (folder / "best").resolve() == (folder / name_of(expected)).resolve(), seed
        (best,), _ = locate(folder / "best")
        assert best.step == expected
        assert {13, expected} <= {checkpoint.step for checkpoint in find(folder)[0]}
        assert len(find(folder)[0]) <= 2 + (kind == "incremental") * 4, "no other is kept"

        # A run of half as many steps, which another goes on with, comes to the same.
        run(half, replace(workload, steps=7), replace(policy, steps=7), seed)
        on = tmp_path / f"{seed}-on"
        run(on, workload, policy, seed, resume=half)
        assert Checkpoint.open((on / "best").resolve()).step == expected, seed
        old += (on / "best").resolve().parent == half.resolve()
    assert (died > 0) == (deaths > 0)
    assert old > 0, "in no run the best was one of the first half"


@pytest.mark.parametrize("damage", ["a file cut short", "no manifest", "nothing there"])
def test_a_damaged_best_is_told_and_left_behind(tmp_path, damage):
    workload = Workload(steps=7)
    policy = CheckpointPolicy(steps=7, every_steps=3, keep_best="auc")
    old, new = tmp_path / "old", tmp_path / "new"
    run(old, workload, policy, seed=2)
    best = (old / "best").resolve()
    (newest,) = [checkpoint for checkpoint in find(old)[0] if checkpoint.step == 7]
    assert Checkpoint.open(best).step < 7
    if damage == "a file cut short":
        os.truncate(best / "dense.bin", 3)
    elif damage == "no manifest":
        (best / "manifest.json").unlink()
    else:
        shutil.rmtree(best)
    (line,) = CheckpointFolder(new).inherit_best(newest).splitlines()
    assert line.startswith(f"{old / 'best'}, the best checkpoint so far, is left behind: ")
    assert not (new / "best").is_symlink()


def test_a_rank_that_dies_as_it_inherits_leaves_that_to_the_next():
    did = []

    def act(rank: int) -> str:
        did.append(rank)
        if rank == 0:
            raise RankKilled
        return f"done by {rank}"

    def program(transport) -> str:
        return decide(transport, lambda: act(transport.rank))

    outcome = SimulatedCluster(3, 1).run(program)
    assert did == [0, 1] and outcome.results == {1: "done by 1", 2: "done by 1"}

"""Checkpoints written, loaded and rolled back on the simulated cluster while ranks die."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ecrm.base.errors import DataError, Unrecoverable
from ecrm.checkpoint import restore
from ecrm.checkpoint.disk import Disk
from ecrm.checkpoint.folder import CheckpointFolder, find, name_of
from ecrm.checkpoint.keeper import CheckpointPolicy, Checkpoints
from ecrm.checkpoint.lost_rows import CheckpointRows
from ecrm.checkpoint.manifest import DENSE
from ecrm.checkpoint.mapped_restore import Reopened
from ecrm.checkpoint.restore import Restorer
from ecrm.checkpoint.write import Part
from ecrm.engine.computed import Computed
from ecrm.engine.hooks import Hooks, StepAborted
from ecrm.engine.record_delivery import place
from ecrm.engine.shard_stores import ShardStores
from ecrm.kernels import dispatch
from ecrm.placement.sparse_optimizer import SparseOptimizer
from ecrm.placement.stripes import RowLayout
from ecrm.placement.tables import Table
from ecrm.protection.restoring import Restoring
from ecrm.storage.hosted import HostedShard
from ecrm.testing.simulate.checkers import Checkers
from ecrm.testing.simulate.oracle import Truth, truth_of
from ecrm.testing.simulate.promise import Violation
from ecrm.testing.simulate.schedule import draw
from ecrm.testing.simulate.workload import Workload, make_engine, run_workload, train_step
from ecrm.testing.simulated_transport import (
    PhaseFault,
    ProgramFailed,
    RandomFaults,
    RankKilled,
    SimulatedCluster,
    SimulationError,
)
from support.seeds import some_and_more
from support.simulating import dies_once
from support.telling import noted_in


class Run:
    """One simulated run with checkpoints.

    `tables` are what it reported, `events` those of all ranks, `killed` the ranks that died.
    `finished` says whether it came to its end.
    """

    def __init__(
        self,
        workload: Workload,
        folder: Path,
        policy: CheckpointPolicy,
        truth: Truth,
        faults=(),
        resume: Path | None = None,
        phase_death: float = 0.0,
        spare_one: bool = True,
        seed: int = 0,
        newest_only: int = 0,
        begins_with: Path | None = None,
    ) -> None:
        self.tables: list[dict[str, str]] = []
        self.events: list[dict[str, object]] = []
        self.lines: list[str] = []
        engines: dict[int, object] = {}
        doomed: set[int] = set()
        checkers = Checkers(engines, doomed, truth, workload.reshape)
        rng = random.Random(seed)

        may_kill = dies_once(
            doomed, lambda rank: not spare_one or len(doomed) + 1 < workload.world_size
        )

        def on_phase(rank: int, step: int, phase: str) -> None:
            if rng.random() < phase_death * (
                10 if phase in ("checkpoint", "manifest", "rollback") else 1
            ) and may_kill(rank, ()):
                raise RankKilled

        if isinstance(faults, RandomFaults):
            faults = replace(faults, may_kill=may_kill)
        cluster = SimulatedCluster(
            workload.world_size, seed, faults, on_phase=on_phase, most_calls=300_000
        )
        identity = {"seed": workload.seed, "rate": workload.rate}

        def program(transport):
            resumed = (
                [found for found in find(resume)[0] if not newest_only or found.step >= newest_only]
                if resume
                else []
            )
            first = find(begins_with)[0][0] if begins_with is not None else None
            rank = transport.rank

            def phase(step: int, name: str) -> None:
                cluster.enter_phase(rank, step, name)
                checkers.at_phase(rank, name)

            hooks = Hooks(
                phase=phase,
                event=noted_in(self.events),
                committed=lambda: checkers.after_commit(rank),
                recovered=lambda: checkers.after_recovery(rank),
            )
            own = CheckpointFolder(folder)
            try:
                return run_workload(
                    workload,
                    transport,
                    hooks,
                    after_start=lambda engine: engines.update({rank: engine}),
                    report=self.tables.append,
                    durable=Reopened()
                    if workload.protection == "mapped"
                    else Restorer(own, resumed, self.lines.append, identity, first),
                    make_checkpoints=lambda engine: Checkpoints(
                        engine,
                        own,
                        identity,
                        policy,
                        noted_in(self.events),
                        lambda: 0.0,
                        lambda work: work(),
                    ),
                    resume=resume is not None or begins_with is not None,
                )
            except (Unrecoverable, DataError) as error:
                return error
            finally:
                engines.pop(rank, None)

        try:
            outcome = cluster.run(program)
        except SimulationError as error:
            error.add_note(f"seed {seed}")
            raise
        self.killed = len(outcome.killed)
        self.rows_checked = checkers.rows
        self.errors = [
            result for result in outcome.results.values() if isinstance(result, Exception)
        ]
        self.finished = bool(self.tables)

    def of(self, kind: str) -> list[dict[str, object]]:
        return [event for event in self.events if event["event"] == kind]


def assert_ended_as(run: Run, truth: Truth, seed: int) -> None:
    """The run is complete, and its tables are those of the undisturbed one."""
    assert not run.errors and run.finished, (seed, run.errors)
    assert all(tables == truth.tables for tables in run.tables), seed


def policy_of(rng: random.Random, steps: int) -> CheckpointPolicy:
    return CheckpointPolicy(
        steps=steps,
        every_steps=rng.choice((1, 2, 3, 5)),
        mode=rng.choice(("sync", "async")),
        kind=rng.choice(("full", "incremental")),
        full_every=rng.choice((2, 3, 8)),
        keep=rng.choice((1, 2, 3)),
    )


def shape_of(rng: random.Random, workload: Workload, name: str) -> Workload:
    """The same job on another cluster, with another protection."""
    k, m = rng.randint(1, 4), rng.randint(1, 2)
    servers = k + m + rng.randint(0, 2) if name == "erasure" else rng.randint(1, 5)
    if name in ("chain", "replicate"):
        k, servers = 1, 1 + m + rng.randint(0, 2)
    return replace(
        workload,
        servers=servers,
        trainers=rng.randint(1, workload.slots),
        spares=rng.randint(1, 3),
        k=k,
        m=m,
        protection=name,
        layout=rng.choice(("dedicated", "colocated")),
        commit_interval=rng.choice((1, 2, 3)),
        domains=None,
        scrub_rows_per_step=rng.choice((0, 16)) if name == "erasure" else 0,
    )


def job(seed: int, name: str) -> tuple[random.Random, Workload, Truth]:
    rng = random.Random(f"checkpoint {seed}")
    drawn = draw(seed, "survivable").workload
    workload = shape_of(rng, replace(drawn, steps=drawn.steps + 4), name)
    return rng, workload, truth_of(workload)


THIRTY, TWENTY = some_and_more(6, 30), some_and_more(4, 20)


@pytest.mark.parametrize("seeds", THIRTY)
@pytest.mark.parametrize("name", ["erasure", "none", "checkpoint", "chain", "replicate", "mapped"])
def test_any_ranks_but_one_may_die_at_any_instant(tmp_path, name, seeds):
    died = rolled_back = written = 0
    for seed in seeds:
        rng, workload, truth = job(seed, name)
        if name == "mapped":
            workload = replace(workload, folder=str(tmp_path / f"{seed}-files"))
            Path(workload.folder).mkdir()
        faults = RandomFaults(
            most=workload.world_size,
            per_call=rng.choice((0.002, 0.01)),
            per_recovery_call=0.05,
            together=0.5,
        )
        run = Run(
            workload,
            tmp_path / str(seed),
            policy_of(rng, workload.steps),
            truth,
            faults,
            phase_death=0.003,
            seed=seed,
        )
        assert_ended_as(run, truth, seed)
        died, rolled_back, written = (
            died + run.killed,
            rolled_back + len(run.of("rolled_back")),
            written + len(run.of("checkpoint")),
        )
    print(f"{name}: {died} deaths, {rolled_back} ranks rolled back, {written} told of checkpoints")
    assert died > len(seeds) and rolled_back > len(seeds) / 2 and written > 3 * len(seeds)


@pytest.mark.parametrize("seeds", THIRTY)
@pytest.mark.parametrize("name", ["erasure", "checkpoint", "replicate", "mapped"])
def test_all_may_die_and_another_cluster_goes_on(tmp_path, name, seeds):
    unfinished = resumed_later = 0
    for seed in seeds:
        rng, workload, truth = job(seed, name)
        if name == "mapped":
            workload = replace(workload, folder=str(tmp_path / f"{seed}-files"))
            Path(workload.folder).mkdir()
        policy, folder = policy_of(rng, workload.steps), tmp_path / str(seed)
        faults = RandomFaults(
            most=workload.world_size, per_call=rng.choice((0.002, 0.01)), together=0.99
        )
        first = Run(workload, folder, policy, truth, faults, spare_one=False, seed=seed)
        if not find(folder)[0]:
            continue
        unfinished += not first.finished
        other = shape_of(
            rng, workload, rng.choice(("erasure", "none", "checkpoint", "chain", "replicate"))
        )
        faults = RandomFaults(
            most=other.world_size, per_call=0.005, per_recovery_call=0.05, together=0.3
        )
        second = Run(
            other,
            tmp_path / f"{seed}-on",
            policy_of(rng, other.steps),
            truth,
            faults,
            resume=folder,
            phase_death=0.005,
            seed=seed,
        )
        assert_ended_as(second, truth, seed)
        resumed_later += find(tmp_path / f"{seed}-on")[0] != []
    print(f"{name}: {unfinished} runs killed as a whole and finished elsewhere")
    assert unfinished > len(seeds) / 8


def test_without_a_checkpoint_yet_the_run_starts_again(tmp_path):
    workload = Workload(protection="checkpoint")
    truth = truth_of(workload)
    run = Run(
        workload,
        tmp_path,
        CheckpointPolicy(steps=6, every_steps=100),
        truth,
        [PhaseFault(1, 3, "update")],
    )
    assert run.tables == [truth.tables] and {event["step"] for event in run.of("rolled_back")} == {
        0
    }


def truth_with_another_rate(workload: Workload, step: int, rate: float) -> Truth:
    """The undisturbed truth of a job whose learning rate is `rate` from a step on."""

    def change(engine) -> None:
        for hosted in engine.state.hosted.values() if engine.step == step else ():
            hosted.store._optimizer = replace(hosted.store._optimizer, learning_rate=rate)

    return truth_of(workload, change)


@pytest.mark.parametrize("seeds", TWENTY)
@pytest.mark.parametrize("same_folder", [False, True])
def test_a_run_that_goes_on_with_another_rate_ends_the_same_whatever_dies(
    tmp_path, same_folder, seeds
):
    rolled_back = 0
    for seed in seeds:
        name = ("erasure", "checkpoint")[seed % 2]
        rng, workload, _ = job(seed, name)
        # the rate that changes is that of tables without an optimizer of their own
        workload = replace(
            workload, tables=tuple(replace(table, optimizer=None) for table in workload.tables)
        )
        truth = truth_of(workload)
        folder, half = tmp_path / str(seed), workload.steps // 2
        short = replace(workload, steps=half)
        Run(short, folder, CheckpointPolicy(half, every_steps=1, keep=3), truth_of(short))
        assert [found.step for found in find(folder)[0]][:2] == [half, half - 1]
        faster = replace(shape_of(rng, workload, name), rate=0.3)
        expected = truth_with_another_rate(workload, half, 0.3)
        assert expected.tables != truth.tables
        faults = RandomFaults(
            most=faster.world_size, per_call=0.005, per_recovery_call=0.05, together=0.5
        )
        on = folder if same_folder else tmp_path / f"{seed}-on"
        run = Run(
            faster,
            on,
            policy_of(rng, faster.steps),
            expected,
            faults,
            resume=folder,
            phase_death=0.003,
            seed=seed,
            newest_only=half,
        )
        assert_ended_as(run, expected, seed)
        rolled_back += len(run.of("rolled_back"))
    assert rolled_back > len(seeds) / 4


def truth_that_begins_with(workload: Workload, other: Workload, step: int) -> Truth:
    """The right result of a job that starts from the values of `other`.

    `other` has updated rows up to a step; the job takes over these rows and the dense parameters.
    """
    theirs, first = truth_of(other), []

    def begin(engine) -> None:
        if engine.step or first:
            return
        for space, records in enumerate(theirs.records[step]):
            store = engine.state.hosted[0, space].store
            updated = records.view(torch.float32)[:, -1] != 0
            store.weights[updated] = records.view(torch.float32)[updated, : store.dim]
            store._touched[updated] = 1.0
            first.append(store.read(torch.arange(len(records))))
        engine.state.dense.value = theirs.dense[step].clone()
        engine.state.dense.commit()

    truth = truth_of(workload, begin)
    truth.records[0], truth.dense[0] = first, theirs.dense[step]
    return truth


@pytest.mark.parametrize(
    "name",
    ["erasure"]
    + [pytest.param(name, marks=pytest.mark.drill) for name in ("checkpoint", "replicate", "none")],
)
@pytest.mark.parametrize("seeds", TWENTY)
def test_a_run_that_begins_with_another_s_weights_ends_the_same_whatever_dies(
    tmp_path, name, seeds
):
    """Starts from another run's weights, with another cluster and optimizer.

    A rollback before the first checkpoint goes back to these weights, not to the initial values of
    the hash.
    """
    to_the_start = further = 0
    for seed in seeds:
        rng, source, _ = job(seed, "none")
        kind = rng.choice(("full", "incremental"))
        source = replace(source, optimizer=rng.choice(("rowwise_adagrad", "sgd")))
        half = source.steps // 2
        Run(
            replace(source, steps=half),
            tmp_path / str(seed),
            CheckpointPolicy(half, every_steps=1, kind=kind),
            truth_of(replace(source, steps=half)),
        )
        workload = replace(
            shape_of(rng, source, name),
            optimizer=rng.choice(("rowwise_adagrad", "adagrad")),
            rate=0.1,
        )
        truth = truth_that_begins_with(workload, source, half)
        assert truth.tables != truth_of(workload).tables
        faults = RandomFaults(
            most=workload.world_size,
            per_call=rng.choice((0.002, 0.01)),
            per_recovery_call=0.05,
            together=0.5,
        )
        policy = replace(policy_of(rng, workload.steps), every_steps=rng.choice((2, 4)))
        for these in ((), faults):
            folder = tmp_path / f"{seed}-{'disturbed' if these else 'calm'}"
            run = Run(
                workload, folder, policy, truth, these, seed=seed, begins_with=tmp_path / str(seed)
            )
            assert_ended_as(run, truth, seed)
            steps = {event["step"] for event in run.of("rolled_back")}
            to_the_start, further = to_the_start + (0 in steps), further + bool(steps - {0})
    print(
        f"{name}: {to_the_start} runs rolled back to their first weights, {further} to checkpoints"
    )
    assert to_the_start > 0 and further >= len(seeds) // 10


def test_weights_to_begin_with_that_are_damaged_end_the_run(tmp_path):
    workload = Workload()
    Run(workload, tmp_path / "source", CheckpointPolicy(steps=6, every_steps=6), truth_of(workload))
    file = next((tmp_path / "source" / name_of(6)).glob("rows*"))
    file.write_bytes(bytes(len(file.read_bytes())))
    run = Run(
        workload,
        tmp_path / "run",
        CheckpointPolicy(steps=6),
        truth_of(workload),
        begins_with=tmp_path / "source",
    )
    assert len(run.errors) == workload.world_size
    assert all(
        "the weights to begin with cannot be read" in str(error) and str(file) in str(error)
        for error in run.errors
    )


def test_a_shard_restored_by_itself_begins_with_another_s_weights(tmp_path):
    """As with stateless, before the first checkpoint of a run."""
    workload = Workload(steps=6)
    truth = truth_of(workload)
    Run(workload, tmp_path, CheckpointPolicy(steps=6, every_steps=6), truth)
    other = replace(workload, optimizer="adagrad")
    stores = ShardStores(SparseOptimizer("adagrad", 0.05), workload.tables, 0)
    protection = other.make_protection()
    layouts = [RowLayout(protection.shape, space.rows) for space in stores.spaces]
    for shard in range(workload.servers):
        hosted = stores.host([shard], layouts, protection, missing=True)
        reader = CheckpointRows(None, begins_with=tmp_path / name_of(6)).read(shard, layouts)
        restoring = Restoring(reader, {space: of for (_, space), of in hosted.items()})
        while restoring.left:
            restoring.go_on(50)
        assert reader.step == 0
        for space, layout in enumerate(layouts):
            local = torch.arange(layout.data_rows_per_shard)
            rows = layout.rows_of(shard, local)
            local, rows = (
                local[rows < stores.spaces[space].rows],
                rows[rows < stores.spaces[space].rows],
            )
            expected = truth.records[6][space][rows].view(torch.float32)
            got = hosted[shard, space].store.read(local).view(torch.float32)
            dim = stores.spaces[space].dim
            assert torch.equal(got[:, :dim], expected[:, :dim]) and torch.equal(
                got[:, -1], expected[:, -1]
            )
            assert not got[:, dim:-1].any()


def test_a_folder_s_checkpoints_of_another_rate_are_not_gone_back_to(tmp_path):
    """With the newest checkpoint damaged, there is none to go on from.

    An older one would make the run do steps again in another way than before.
    """
    workload = Workload(steps=6)
    Run(workload, tmp_path, CheckpointPolicy(steps=6, every_steps=2, keep=9), truth_of(workload))
    file = next((tmp_path / name_of(6)).glob("rows*"))
    file.write_bytes(bytes(len(file.read_bytes())))
    longer = replace(workload, steps=9)
    policy = CheckpointPolicy(steps=9, every_steps=2)
    run = Run(
        replace(longer, rate=0.3),
        tmp_path,
        policy,
        truth_of(longer),
        resume=tmp_path,
        newest_only=6,
    )
    assert len(run.errors) == workload.world_size and all(
        "no checkpoint is left" in str(error) for error in run.errors
    )
    run = Run(longer, tmp_path, policy, truth_of(longer), resume=tmp_path)
    assert run.finished and not run.errors


@pytest.mark.parametrize("kind", ["full", "incremental"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_checkpoints_come_when_they_should_and_are_kept_as_asked(tmp_path, kind, mode):
    workload = Workload(steps=11, commit_interval=3)
    policy = CheckpointPolicy(steps=11, every_steps=2, mode=mode, kind=kind, full_every=3, keep=2)
    run = Run(workload, tmp_path, policy, truth_of(workload))
    told = {event["step"]: event["kind"] for event in run.of("checkpoint")}
    assert sorted(told) == [2, 4, 6, 8, 10, 11]
    assert list(told.values()) == (
        ["full"] * 6 if kind == "full" else ["full", "incremental", "incremental"] * 2
    )
    assert [checkpoint.step for checkpoint in find(tmp_path)[0]] == (
        [11, 10] if kind == "full" else [11, 10, 8]
    )
    sizes = {event["step"]: event["rows"] for event in run.of("checkpoint")}
    assert kind == "full" or sizes[11] < sizes[8]


def test_checkpoints_are_the_same_on_a_gpu_and_serve_both(tmp_path):
    """Records there have zeros in them that are not written."""
    on_cpu = Workload(steps=5)
    jobs = {"cpu": on_cpu, "gpu": replace(on_cpu, rows_on="imitated")}
    half, truth = truth_of(replace(on_cpu, steps=3)), truth_of(on_cpu)
    with dispatch.used_on_gpu("reference"):
        for name, workload in jobs.items():
            policy = CheckpointPolicy(steps=3, every_steps=3)
            Run(replace(workload, steps=3), tmp_path / name, policy, half)
        cpu, gpu = (
            {file.name: file.read_bytes() for file in (tmp_path / name / name_of(3)).iterdir()}
            for name in jobs
        )
        assert len(cpu) > 4 and cpu == gpu
        for name, other in (("cpu", "gpu"), ("gpu", "cpu")):
            policy = CheckpointPolicy(steps=5, every_steps=100)
            on = tmp_path / f"from {other}"
            run = Run(jobs[name], on, policy, truth, resume=tmp_path / other)
            assert not run.errors and run.tables == [truth.tables], name


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_used(tmp_path):
    workload = Workload(steps=8, protection="checkpoint", spares=2)
    truth = truth_of(workload)
    Run(
        replace(workload, steps=6),
        tmp_path / "first",
        CheckpointPolicy(steps=6, every_steps=2, keep=9),
        truth_of(replace(workload, steps=6)),
    )
    file = next((tmp_path / "first" / name_of(6)).glob("rows*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    run = Run(
        workload,
        tmp_path / "second",
        CheckpointPolicy(steps=8, every_steps=100),
        truth,
        resume=tmp_path / "first",
    )
    assert run.tables == [truth.tables]
    assert len(run.lines) == 1 and str(file) in run.lines[0] and "CRC-32" in run.lines[0]
    for step in (2, 4):
        next((tmp_path / "first" / name_of(step)).glob("dense*")).write_bytes(b"?" * 20)
    run = Run(
        workload,
        tmp_path / "third",
        CheckpointPolicy(steps=8, every_steps=100),
        truth,
        resume=tmp_path / "first",
    )
    assert len(run.errors) == workload.world_size and all(
        "no checkpoint is left" in str(error) for error in run.errors
    )


def _incremental_run(tmp_path: Path) -> Run:
    """A run of incremental checkpoints that is rolled back once, near its end."""
    workload = Workload(steps=12, protection="erasure", spares=2)
    policy = CheckpointPolicy(steps=12, every_steps=2, kind="incremental", full_every=8)
    return Run(
        workload,
        tmp_path,
        policy,
        truth_of(workload),
        [PhaseFault(rank, 11, "update") for rank in (0, 1)],
    )


def test_a_chain_is_rolled_back_to(tmp_path):
    run = _incremental_run(tmp_path)
    assert {event["step"] for event in run.of("rolled_back")} == {10}
    assert {event["kind"] for event in run.of("checkpoint") if event["step"] == 10} == {
        "incremental"
    }


@pytest.mark.parametrize(
    "broken",
    ["touched rows are not noted", "loaded rows are not encoded", "the base is not loaded"],
)
def test_a_broken_checkpoint_is_caught(tmp_path, monkeypatch, broken):
    if broken == "touched rows are not noted":
        right = HostedShard.update

        def update(self, *given):
            noted, self.touched = self.touched, None
            right(self, *given)
            self.touched = noted

        monkeypatch.setattr(HostedShard, "update", update)
    elif broken == "loaded rows are not encoded":
        monkeypatch.setattr(restore, "place", lambda *given: place(*given) and {})
    else:
        whole = restore._load
        monkeypatch.setattr(
            restore, "_load", lambda checkpoint, *rest: whole(replace(checkpoint, before=()), *rest)
        )
    with pytest.raises(ProgramFailed) as caught:
        _incremental_run(tmp_path)
    assert isinstance(next(iter(caught.value.errors.values())), Violation)


def test_minutes_are_told_by_one_clock(tmp_path):
    """Every step takes 10 s, as rank 0 has it; a checkpoint every minute."""
    workload = Workload(steps=40)
    times: dict[int, float] = {}
    steps: list[int] = []

    def program(transport):
        def clock() -> float:
            return 10.0 * times.get(transport.rank, 0) + 1000 * transport.rank

        return run_workload(
            workload,
            transport,
            after_step=lambda engine: times.update({transport.rank: engine.step}),
            make_checkpoints=lambda engine: Checkpoints(
                engine,
                CheckpointFolder(tmp_path),
                {},
                CheckpointPolicy(steps=40, every_minutes=1),
                lambda told: steps.append(told.step),
                clock,
            ),
        )

    SimulatedCluster(workload.world_size, 1).run(program)
    assert sorted(set(steps)) == [6, 12, 18, 24, 30, 36, 40]


SLOW = {"tables": (Table("a", 9000, 8),), "rebuild_rows_per_step": 1, "spares": 4}
"""A rebuilding takes longer than the whole job."""


@pytest.mark.parametrize("kind", ["full", "incremental"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_failures_closer_together_than_a_rebuilding_takes(tmp_path, mode, kind):
    """A checkpoint that is due waits for half an interval, and is rolled back to."""
    workload = Workload(steps=16, **SLOW)
    truth = truth_of(workload)
    deaths = [PhaseFault(rank, step, "update") for rank, step in ((0, 2), (1, 7), (2, 11), (3, 11))]
    run = Run(
        workload,
        tmp_path,
        CheckpointPolicy(steps=16, every_steps=4, mode=mode, kind=kind),
        truth,
        deaths,
    )
    assert run.killed == 4 and not run.errors
    assert list(dict.fromkeys(event["step"] for event in run.of("checkpoint"))) == [6, 10, 12, 16]
    assert {event["step"] for event in run.of("rolled_back")} == {10}
    assert run.tables == [truth.tables]


def test_failures_do_not_put_off_a_checkpoint_that_goes_by_the_clock(tmp_path):
    """Every step takes 10 s. A checkpoint is due every minute, and trainers die more often."""
    workload = Workload(steps=40, spares=4)
    times: Counter[int] = Counter()  # told before and after a step
    steps: list[int] = []

    def program(transport):
        rank, folder = transport.rank, CheckpointFolder(tmp_path)

        def make(engine):
            def clock() -> float:
                return 5.0 * times[rank]

            policy = CheckpointPolicy(steps=40, every_minutes=1)
            return Checkpoints(
                engine, folder, {}, policy, lambda told: steps.append(told.step), clock
            )

        return run_workload(
            workload,
            transport,
            Hooks(phase=lambda *at: cluster.enter_phase(rank, *at)),
            after_step=lambda engine: times.update((rank,)),
            durable=Restorer(folder),
            make_checkpoints=make,
        )

    deaths = [PhaseFault(rank, step, "update") for rank, step in ((4, 4), (5, 9), (6, 14), (7, 19))]
    cluster = SimulatedCluster(workload.world_size, 1, deaths)
    assert len(cluster.run(program).killed) == 4
    reached = [0, *sorted(set(steps))]
    assert reached[-1] == 40
    assert max(later - earlier for earlier, later in zip(reached, reached[1:])) <= 7


@pytest.mark.parametrize("seconds", [1000, 1])
def test_a_run_asked_to_stop_while_it_rebuilds(tmp_path, seconds):
    """A rank also dies during the rebuilding.

    The clock goes on by one second each time that it is read.
    """
    workload = Workload(steps=20, servers=5, k=3, m=2, **SLOW)
    events: list[dict[str, object]] = []

    def program(transport):
        engine = make_engine(
            workload,
            transport,
            Hooks(phase=lambda *at: cluster.enter_phase(transport.rank, *at)),
            lambda: 0.0,
        )
        folder, clock, computed = CheckpointFolder(tmp_path), count(), Computed()
        checkpoints = Checkpoints(
            engine,
            folder,
            {},
            CheckpointPolicy(steps=20, every_steps=100),
            noted_in(events),
            clock.__next__,
        )
        while True:
            try:
                while engine.step < 5:
                    train_step(workload, engine, computed)
                return checkpoints.stop(seconds)
            except StepAborted:
                checkpoints.on_recovery()

    cluster = SimulatedCluster(
        workload.world_size, 1, [PhaseFault(0, 3, "update"), PhaseFault(1, 5, "repair")]
    )
    assert len(cluster.run(program).killed) == 2
    if seconds > 1:
        assert {(event["event"], event["step"]) for event in events} == {("checkpoint", 5)}
        truth = truth_of(workload)
        run = Run(workload, tmp_path / "on", CheckpointPolicy(steps=20), truth, resume=tmp_path)
        assert run.tables == [truth.tables]
    else:
        assert {event["event"] for event in events} == {"checkpoint_failed"} and not find(tmp_path)[
            0
        ]
        assert all("lost rows were not rebuilt in 1 s" in event["why"] for event in events)


def test_a_run_that_goes_on_after_all_writes_checkpoints_as_before(tmp_path):
    """The rank that was asked to stop dies while the checkpoint of step 5 is written.

    After that nobody asks for a stop.
    """
    workload, events = Workload(steps=12), []

    def program(transport):
        engine = make_engine(
            workload,
            transport,
            Hooks(phase=lambda *at: cluster.enter_phase(transport.rank, *at)),
            lambda: 0.0,
        )
        policy = CheckpointPolicy(steps=12, every_steps=4, keep=9)
        checkpoints, computed = (
            Checkpoints(engine, CheckpointFolder(tmp_path), {}, policy, noted_in(events)),
            Computed(),
        )
        asked = True
        while engine.step < workload.steps:
            try:
                checkpoints.between_steps()
                if asked and engine.step == 5:
                    checkpoints.stop(1000)
                train_step(workload, engine, computed)
            except StepAborted:
                checkpoints.on_recovery()
                asked = False
        return checkpoints.finish()

    cluster = SimulatedCluster(workload.world_size, 1, [PhaseFault(0, 5, "checkpoint")])
    assert len(cluster.run(program).killed) == 1
    assert sorted({event["step"] for event in events}) == [4, 10, 12], (
        "that of step 8 waits for the rebuilding, for half an interval"
    )


def test_a_checkpoint_that_was_given_up_leaves_the_next_one_of_its_step_alone(
    tmp_path, monkeypatch
):
    """A trainer dies while the checkpoint of step 4 is written, so a second write of it begins.

    The first writer finishes after the second.
    """
    workload, created, create = Workload(steps=7), [], Disk.create
    monkeypatch.setattr(
        Disk, "create", lambda disk, path: created.append(path.name) or create(disk, path)
    )

    def program(transport):
        engine = make_engine(
            workload,
            transport,
            Hooks(phase=lambda *at: cluster.enter_phase(transport.rank, *at)),
            lambda: 0.0,
        )
        policy, waiting, computed = (
            CheckpointPolicy(steps=7, every_steps=4, mode="async", at_end=False),
            [],
            Computed(),
        )
        checkpoints = Checkpoints(
            engine, CheckpointFolder(tmp_path), {}, policy, background=waiting.append
        )
        while engine.step < workload.steps:
            try:
                checkpoints.between_steps()
                while engine.step > 4 and waiting:
                    waiting.pop()()  # the last first
                train_step(workload, engine, computed)
            except StepAborted:
                checkpoints.on_recovery()

    trainer = workload.servers + 1  # the other one reports
    cluster = SimulatedCluster(workload.world_size, 1, [PhaseFault(trainer, 4, "parity")])
    assert [kill.rank for kill in cluster.run(program).killed] == [trainer]
    assert [checkpoint.step for checkpoint in find(tmp_path)[0]] == [4]
    assert len([name for name in created if name.startswith(DENSE)]) == 1


def test_a_writer_that_is_given_up_inside_its_write_spoils_no_other_dense_state(tmp_path):
    """The second attempt finishes while the first one hangs in the write of its dense state."""

    def engine(state: float) -> SimpleNamespace:
        return SimpleNamespace(
            step=4,
            rank=0,
            view=SimpleNamespace(reporter=0),
            state=SimpleNamespace(
                spaces=(),
                layouts=(),
                hosted={},
                export_dense=lambda: [torch.full((3000,), state)],
                dense=SimpleNamespace(is_finite=lambda state: True),
            ),
        )

    second = Part(engine(2.0), tmp_path, Disk(), False, False, attempt=2)

    class Slow(Disk):
        def write(self, file, data) -> None:
            if not second.done:
                second.run()
                second.name_dense()
            super().write(file, data)

    first = Part(engine(1.0), tmp_path, Slow(), False, False, attempt=1)
    first.run()
    (entry,) = second.entries
    assert first.done and second.done and not second.trouble
    assert (tmp_path / DENSE).stat().st_size == entry["bytes"] == 12_000
    assert zlib.crc32((tmp_path / DENSE).read_bytes()) == entry["crc32"]


def test_all_ranks_together_count_the_bytes_of_all_checkpoints(tmp_path):
    workload, events, writers = Workload(steps=7), {}, []

    def make(engine):
        def tell(told):
            events[told.step] = told.bytes

        writers.append(
            Checkpoints(
                engine,
                CheckpointFolder(tmp_path),
                {},
                CheckpointPolicy(steps=7, every_steps=3, keep=9),
                tell,
            )
        )
        return writers[-1]

    SimulatedCluster(workload.world_size, 1).run(
        lambda transport: run_workload(workload, transport, make_checkpoints=make)
    )
    assert sorted(events) == [3, 6, 7]
    assert sum(writer.written_bytes for writer in writers) == sum(events.values()) > 0


def test_a_disk_that_is_full_costs_the_checkpoint_not_the_run(tmp_path, monkeypatch):
    from ecrm.checkpoint.disk import Disk

    def full(self, file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Disk, "write", full)
    workload = Workload(steps=5)
    truth = truth_of(workload)
    run = Run(workload, tmp_path, CheckpointPolicy(steps=5, every_steps=2), truth)
    assert run.tables == [truth.tables] and not run.of("checkpoint")
    assert {event["step"] for event in run.of("checkpoint_failed")} == {2, 4, 5}
    assert all("No space left" in event["why"] for event in run.of("checkpoint_failed"))
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [], (
        "what was written keeps its room on the disk"
    )
